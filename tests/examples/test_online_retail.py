"""The retail data as published becomes the file that the replay reads."""

from datetime import datetime
from pathlib import Path

from freshet.recordings.retail import read_lines
from tests.examples.loading import example

convert = example("online-retail", "convert")


def row(invoice: object, minute: int, **changed: object) -> dict[str, object]:
    made = {
        "Invoice": invoice,
        "StockCode": "85123A",
        "Description": "HOLDER",
        "Quantity": 6,
        "InvoiceDate": datetime(2010, 12, 1, 8, minute),
        "Price": 2.55,
        "Customer ID": 17850.0,
        "Country": "United Kingdom",
    }
    return {**made, **changed}


def test_sheets_become_one_file_by_time_without_what_both_hold(tmp_path: Path) -> None:
    first = [row(536365, 26, **{"Customer ID": None}), row("C536379", 20, Quantity=-1, StockCode=22632)]
    second = [row(536365, 26), row(536370, 45), row(1, 50, StockCode=None), row(2, 51, InvoiceDate=None)]

    read = read_lines(convert.write(convert.lines([first, second]), tmp_path / "data"))

    assert read.invoices == ["C536379", "536365", "536370"]
    assert read.customer.tolist() == [17850, -1, 17850]
    assert read.quantity.tolist() == [-1, 6, 6]
    assert read.ts.tolist() == [1291191600, 1291191960, 1291193100]
    assert read.items == ["22632", "85123A"]
