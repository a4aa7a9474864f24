import subprocess
import sys

import pytest

import freshet
from freshet.cli import VERBS


def test_the_public_names_are_these():
    nouns = ["AsyncClient", "Client", "Model", "Parameter", "Spec", "Transform"]
    assert freshet.__all__ == [*nouns, "backtest", "local", "replay"]


def test_every_public_name_can_be_imported():
    for name in freshet.__all__:
        assert getattr(freshet, name) is not None


def test_another_name_is_an_attribute_error():
    assert not hasattr(freshet, "train")


def test_importing_freshet_loads_no_heavy_module():
    code = (
        "import sys, freshet; print([m for m in ('torch', 'numpy', 'freshet._native') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "verb", [[], *([verb] for verb in VERBS)], ids=lambda verb: " ".join(verb) or "freshet"
)
def test_help_loads_only_its_texts(verb):
    code = (
        f"import sys\nfrom freshet.cli import cli\n"
        f"try:\n    cli({[*verb, '--help']!r})\nexcept SystemExit:\n    pass\n"
        "slow = ('numpy', 'torch', 'structlog', 'freshet.config.spec', 'freshet.log', 'freshet.gateway')\n"
        "print([m for m in sys.modules if m.startswith(slow)])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip().splitlines()[-1] == "[]"
