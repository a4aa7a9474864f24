import subprocess
import sys

import pytest

IMPORTS = """
import sys

import pytest
import freshet.apps.pipeline, freshet.apps.services, freshet.apps.trainer
print(*sorted({module.split(".")[0] for module in sys.modules} & {"grpc", "torch"}))
"""


@pytest.mark.slow
def test_a_trainer_with_own_rows_needs_neither_grpc_nor_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)

    assert (done.stdout, done.returncode) == ("\n", 0), done.stderr
