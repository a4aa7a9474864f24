"""Bytes a sample on each wire, and the cost of shorter codecs in quality, on the retail stream.

    python -m bench.wires --file build/retail/retail.parquet [--samples 300000] [--codecs fp32,int8]

The spec of examples/online-retail in mode `sync` with one lane, so that two runs differ by the codec alone.
`shards`: the rank looks rows up itself; rows and gradients cross one wire, once. `embedders`: an embedder
does, and both cross two wires by the same codec. Bytes are those of the rank's wire: its requests and
gradients are sent, rows and batches received. `auc_beside_fp32_1e_5` is of the same way.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import get_args

from bench.apart import Apart, Passed
from bench.modes import log_of, spec_of
from bench.report import Figures, command
from freshet.config.settings.common import Codec

CODECS = ",".join(get_args(Codec))
WAYS = {"shards": 0, "embedders": 1}


def measure(
    quick: bool = False,
    file: Path = Path("build/retail/retail.parquet"),
    samples: int = 300_000,
    codecs: str = CODECS,
    ways: str = ",".join(WAYS),
) -> Figures:
    """Measure each way and codec; fp32 is the first of CODECS."""
    samples = min(samples, 30_000) if quick else samples
    figures: Figures = {"samples": samples}
    with tempfile.TemporaryDirectory() as folder:
        log = log_of(file, samples, 1, Path(folder))
        for way in ways.split(","):
            found: dict[str, Passed] = {}
            for codec in codecs.split(","):
                with tempfile.TemporaryDirectory() as run:
                    apart = Apart(embedders=WAYS[way], codec=codec)
                    found[codec] = apart.train(spec_of("sync", 512, 1), log, Path(run))
                print(f"{way} {codec}: {found[codec]}", file=sys.stderr, flush=True)
            figures[way] = {codec: _figures(passed, found.get("fp32")) for codec, passed in found.items()}
    return figures


def _figures(passed: Passed, plain: Passed | None) -> Figures:
    beside = {} if plain is None else {"auc_beside_fp32_1e_5": round((passed.auc - plain.auc) * 1e5)}
    return {
        "sent_bytes_per_sample": passed.sent_bytes,
        "received_bytes_per_sample": passed.received_bytes,
        "auc_1e_5": round(passed.auc * 1e5),
        "logloss_1e_5": round(passed.logloss * 1e5),
        **beside,
    }


if __name__ == "__main__":
    command(measure, __doc__)
