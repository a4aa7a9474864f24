"""The page in a real browser, against a console with scripted answers."""

from __future__ import annotations

import random
import re
import shlex
import time
from collections.abc import Callable
from functools import partial

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from freshet.testing.conditions import wait_until
from tests.page import worlds
from tests.page.scripted import TOKEN, Scripted

pytestmark = pytest.mark.browser

Console = Callable[..., Scripted]
Opened = Callable[..., Page]

INKED = """figure => {
  const canvas = figure.querySelector("canvas");
  if (!canvas) return figure.querySelectorAll("svg path, svg rect, svg circle").length;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.reduce((sum, alpha, i) => sum + (i % 4 === 3 && alpha > 0 ? 1 : 0), 0);
}"""

TICKS = """() => {
  window.ticks = [];
  const draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
    if (this.canvas.closest("#learning")) window.ticks.push(text);
    return draw.call(this, text, ...at);
  };
}"""
"""Collects the texts that are drawn from now on in the chart of learning."""


def live(page: Page) -> Page:
    """The page, once it is connected and has drawn."""
    expect(page.locator("#connection")).to_have_text("● live")
    expect(page.locator(".u-over")).to_have_count(5)
    return page


def wait_for_caption(page: Page, title: str, words: str) -> None:
    figure = page.locator("figure", has=page.get_by_role("heading", name=title))
    expect(figure.locator("figcaption")).to_contain_text(words)


def serious(page: Page) -> list[str]:
    """Return the serious and critical findings of axe."""
    found = Axe().run(page).response["violations"]
    grave = [v for v in found if v["impact"] in {"serious", "critical"}]
    return [f"{v['id']}: {n['html'][:200]} {n.get('failureSummary')}" for v in grave for n in v["nodes"]]


def _sent(server: Scripted, states: int) -> bool:
    return server.states >= states


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


def test_each_figure_draws_and_says_its_latest_value_in_words(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.learning()).url))

    wait_for_caption(page, "Click rate", "times random")
    figures = page.locator("figure")
    captions = figures.locator("figcaption").all_inner_texts()
    assert len(captions) == figures.count() == 8
    assert all(any(c.isdigit() for c in caption) for caption in captions), captions
    assert all(figure.evaluate(INKED) > 4 for figure in figures.all())
    assert "lag 1,204 records" in captions[0]
    assert "random slates" in page.locator("#quality figcaption").first.inner_text()
    page.get_by_label("all samples").check()
    expect(page.locator("#quality figcaption").first).to_contain_text("everything served")


def test_charts_share_their_cursor(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.learning()).url))
    wait_for_caption(page, "Click rate", "times random")

    page.locator("#learning .u-over").hover()

    expect(page.locator("#learning .when")).to_contain_text("at ")
    expect(page.locator("#quality .when").first).to_contain_text("at ")


def test_events_of_versions_are_marked_as_they_happen(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    page = live(opened(server.url))
    wait_for_caption(page, "Click rate", "Version 141 was held")

    held = {"time_ms": int(time.time() * 1000), "number": 977, "what": "held", "reason": "not finite"}
    server.publish(held, event="version")

    wait_for_caption(page, "Click rate", "Version 977 was held")


def test_a_lost_server_greys_the_page_and_is_found_again(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    page = live(opened(server.url, lost=True))

    server.stop()

    expect(page.locator("#lost")).to_contain_text("Connection lost, trying again.")
    expect(page.locator("#lost-age")).to_contain_text(" old")
    expect(page.locator("main")).to_have_attribute("data-stale", "yes")
    assert page.locator("#glance .value").first.inner_text() == "v142"
    assert serious(page) == []
    server.start()
    expect(page.locator("#connection")).to_have_text("● live")
    expect(page.locator("#lost")).to_be_hidden()
    expect(page.locator("#say")).to_have_text("Connected.")


def test_a_page_that_slept_draws_all_records(console: Console, opened: Opened) -> None:
    world = worlds.learning()
    past, server = world["history"], console(world)
    page = live(opened(server.url, lost=True))
    server.stop()
    expect(page.locator("#lost")).to_be_visible()

    page.evaluate("performance.now = (now => () => now() - 8 * 3600e3)(performance.now.bind(performance))")
    held = {"time_ms": int(time.time() * 1000), "number": 977, "what": "held", "reason": "not finite"}
    world["history"] = lambda span_s: past(span_s) | {"versions": [held]}
    server.start()

    wait_for_caption(page, "Click rate", "Version 977 was held")
    wait_for_caption(page, "Click rate", "times random")


def test_a_label_that_is_a_number_is_no_share(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.one_label(worlds.label("revenue", "number"), 20.26)).url))

    wait_for_caption(page, "Mean revenue", "the mean revenue of what the model showed was 20.3")
    tile = page.locator("#glance > div", has_text="mean revenue")
    expect(tile).to_contain_text("20.3")
    page.evaluate(TICKS)
    page.get_by_role("button", name="Theme: system").click()  # draws anew
    wait_until("the axis is drawn", lambda: "20" in page.evaluate("window.ticks"), within_s=20)
    shown = [tile.inner_text(), page.locator("#learning").inner_text(), *page.evaluate("window.ticks")]
    assert [text for text in shown if "%" in text] == []


@pytest.mark.parametrize(
    ("given", "name"), [(None, "rate of purchase"), ("click", "rate of purchase of click")]
)
def test_a_rate_of_another_label_than_clicks_has_its_name(
    console: Console, opened: Opened, given: str | None, name: str
) -> None:
    page = live(opened(console(worlds.one_label(worlds.label("purchase", given=given), 0.0123)).url))

    wait_for_caption(page, name.capitalize(), f"the {name} of what the model showed was 1.2 %")
    expect(page.locator("#glance dt").nth(3)).to_have_text(name)
    expect(page.locator("#learning-sub")).to_have_text(f"{name}, of what was served")


def test_the_worst_segments_of_each_label_are_listed(console: Console, opened: Opened) -> None:
    world = worlds.learning()
    one = world["state"]["segments"][0]
    world["state"]["segments"] = [
        {**one, "label": label, "text": f"{label} {i}", "change": i / 1e3, "low": i / 1e3, "high": i / 1e3}
        for label in ("click", "purchase")
        for i in range(210)
    ]
    page = live(opened(console(world).url))
    rows = page.locator("#segments tbody tr")

    for label in ("click", "purchase"):
        page.locator("#label").select_option(label)
        expect(rows).to_have_count(60)
        expect(rows.first).to_contain_text(f"{label} 209")
        expect(rows.last).to_contain_text(f"{label} 150")


def test_quality_of_the_last_of_32_labels_is_drawn(console: Console, opened: Opened) -> None:
    world = worlds.learning()
    past, names = world["history"], [f"label-{i}" for i in range(32)]
    world["state"]["quality"]["labels"] = [worlds.label(name) for name in names]
    world["history"] = lambda span_s: (
        (found := past(span_s))
        | {"windows": [{**w, "label": name} for w in found["windows"][-8:] for name in names]}
    )
    page = live(opened(console(world).url))

    page.locator("#label").select_option(names[-1])

    wait_for_caption(page, "AUC", "AUC on random slates")


def test_a_silent_server_is_queried_again_at_the_start(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    server.refuse_api = True
    page = opened(server.url, lost=True)

    expect(page.locator("#lost")).to_contain_text("No connection to the console, trying again.")
    assert page.get_by_text("appears here").count() > 5
    server.refuse_api = False
    live(page)


@pytest.mark.parametrize("width", [1440, 375])
def test_a_fleet_is_drawn_by_role_and_listed_by_instance(
    console: Console, opened: Opened, width: int
) -> None:
    page = live(opened(console(worlds.fleet()).url, width=width))

    pipeline = page.locator("#pipeline")
    expect(pipeline.locator("svg .node-name")).to_have_text(
        ["clients", "gateway × 2", "joiner × 2", "trainer × 2", "inference × 2"]
    )
    expect(pipeline.locator("svg .node-state.warn")).to_have_text(["▲ 1 of 2 ready"] * 2)
    expect(pipeline.locator("figcaption")).to_contain_text("1 of 2 inference not ready")
    expect(page.locator("#services-sub")).to_contain_text("gateway 1 of 2, joiner 2, embedder 2")
    rows = page.locator("#services tbody tr")
    expect(rows).to_have_count(12)
    expect(rows.filter(has_text="gateway-1")).to_contain_text("✕ down")
    expect(rows.filter(has_text="gateway-0")).to_contain_text("gateway-0…:7000")
    expect(rows.filter(has_text="gateway-0").locator("td.where span")).to_have_attribute(
        "title", "gateway-0.gateway.news.svc.cluster.local:7000"
    )
    expect(page.get_by_role("columnheader", name="pid")).to_have_count(0)
    assert serious(page) == []
    assert overflow(page) <= 0


def test_of_many_notes_the_first_and_a_count_are_shown(console: Console, opened: Opened) -> None:
    world = worlds.fleet()
    world["state"]["notes"] = [f"gateway-{i}: away" for i in range(20)]

    page = live(opened(console(world).url))

    expect(page.locator("#notes li")).to_have_count(9)
    expect(page.locator("#notes")).to_contain_text("and 12 more, see Services")


def test_an_empty_system_says_where_figures_will_appear(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.empty()).url))

    expect(page.locator("#health")).to_have_text("◐ starting")
    expect(page.locator("#notes")).to_contain_text("trainer: waits for its first samples")
    panels = (
        "learning",
        "freshness",
        "quality",
        "calibration",
        "versions",
        "segments",
        "tables",
        "wires",
        "try",
    )
    for panel in panels:
        assert " here " in page.locator(f"#{panel}").inner_text(), panel
    expect(page.locator("#letters")).to_contain_text("Nothing has been refused")


def test_wires_say_what_they_save_and_links_why(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.learning()).url))

    for words in ("batch", "user,item", "uint8", "90,000", "3×", "0.41 %", "150"):
        expect(page.locator("#wires tbody tr")).to_contain_text(words)
    for words in ("10.0.0.7:7103", "int8", "busy 4.1% of the time"):
        expect(page.locator("#links tbody tr")).to_contain_text(words)


def test_nothing_hostile_is_run_or_breaks_the_page(console: Console, opened: Opened) -> None:
    world = worlds.learning()
    rng = random.Random(7)
    server = console(world)
    page = live(opened(server.url))
    for turn in range(12):
        state = worlds.poisoned(worlds.learning_state(int(time.time() * 1000), 0), rng)
        world["state"] = state | {"model": f"turn {turn}"}
        for at in range(20):
            stop = int(time.time() * 1000) - at * 5_000
            for record in (worlds.vitals(stop), worlds.clicks(stop), worlds.window("random", stop)):
                server.publish(worlds.poisoned(record, rng))
        server.publish("{not json, NaN")
        expect(page.locator("#model")).to_have_text(f"turn {turn}")
    world["requests"] = worlds.poisoned(world["requests"], rng)
    world["ranking"] = worlds.poisoned(world["ranking"], rng)
    page.get_by_role("button", name="Newer requests").click()
    page.get_by_role("button", name="Rank", exact=True).click()
    broken = '{"edges": 3, "services": {"a": 1}, "quality": [], "versions": "x"}'
    for raw in ("null", "[]", "7", '{"now_ms": null}', broken):
        world["state"], sent = raw, server.states
        wait_until("the broken state is sent", partial(_sent, server, sent + 2), within_s=60)
    world["state"] = {"model": worlds.HOSTILE}
    expect(page.locator("#model")).to_contain_text("<img src=x")

    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, main script").count() == 0
    assert overflow(page) <= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 375])
def test_axe_finds_nothing_serious_and_nothing_overflows(
    console: Console, opened: Opened, scheme: str, width: int
) -> None:
    page = live(opened(console(worlds.learning()).url, width=width, color_scheme=scheme))
    wait_for_caption(page, "Click rate", "times random")
    page.get_by_role("button", name="Rank", exact=True).click()
    expect(page.locator("#try .said")).to_contain_text("10 items ranked by version 142")

    assert serious(page) == []
    assert overflow(page) <= 0


def test_the_theme_is_chosen_by_a_button_and_remembered(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.learning()).url, color_scheme="light"))
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)

    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()

    assert page.evaluate(ground) != before
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate(ground) != before


def test_the_tab_key_follows_the_order_of_reading(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.learning()).url))
    focused = "(({ id, name, textContent }) => id || name || textContent)(document.activeElement)"

    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the figures"
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "main"
    page.reload()
    live(page)
    seen = []
    for _ in range(5):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(focused))
    assert seen == ["Skip to the figures", "span", "theme", "of", "label"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_promoting_asks_and_teaches_where_the_token_is(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    page = live(opened(server.url, lost=True))

    page.get_by_role("button", name="Promote version 140").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("/home/ada/freshet-demo/state/console.token")
    assert serious(page) == []
    dialog.get_by_label("Token").fill("wrong")
    dialog.get_by_role("button", name="Promote v140").click()
    expect(dialog.get_by_role("alert")).to_contain_text("this is not the console's token")
    dialog.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#versions-said")).to_have_text("Version 140 was promoted.")
    page.get_by_role("button", name="Roll back…").click()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert [a[1:] for a in server.asked] == [("/api/promote", {"number": 140})] * 2


def test_a_change_that_is_sent_cannot_be_cancelled(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    page = live(opened(f"{server.url}/#token={TOKEN}"))
    dialog = page.get_by_role("dialog")
    server.answers.clear()

    page.get_by_role("button", name="Promote version 140").click()
    dialog.get_by_role("button", name="Promote v140").click()

    expect(dialog.get_by_role("button", name="Cancel")).to_be_disabled()
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    server.answers.set()
    expect(dialog).to_be_hidden()
    expect(page.locator("#versions-said")).to_have_text("Version 140 was promoted.")


def test_a_late_answer_leaves_the_next_question_open(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    page = live(opened(f"{server.url}/#token={TOKEN}"))
    dialog, said = page.get_by_role("dialog"), page.locator("#versions-said")
    server.answers.clear()

    page.get_by_role("button", name="Promote version 140").click()
    dialog.get_by_role("button", name="Promote v140").click()
    wait_until("the change is sent", lambda: len(server.asked) == 1, within_s=20)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")  # a browser closes a dialog at the second one, whatever its page does
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Promote version 139").click()
    server.answers.set()
    expect(said).to_have_text("Version 140 was promoted.")
    expect(dialog).to_contain_text("Serve version 139?")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Promote version 138").click()
    dialog.get_by_role("button", name="Promote v138").click()

    expect(said).to_have_text("Version 138 was promoted.")
    assert [body for _, _, body in server.asked] == [{"number": 140}, {"number": 138}]


def test_a_focused_button_keeps_the_focus_as_versions_come(console: Console, opened: Opened) -> None:
    world = worlds.learning()
    page = live(opened(console(world).url))
    versions = world["state"]["versions"]
    button = page.get_by_role("button", name="Promote version 140")

    def newer(number: int, **more: object) -> None:
        versions["list"] = [{**versions["list"][0], "number": number}, *versions["list"][:-1]]
        versions.update(more)
        expect(page.locator("#versions tbody tr").first).to_contain_text(f"v{number}")

    button.focus()
    focused = page.evaluate_handle("document.activeElement")
    newer(144)
    assert page.evaluate("node => node === document.activeElement", focused)
    page.keyboard.press("Enter")
    newer(145)
    page.keyboard.press("Escape")
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    newer(146, aliases={"stable": 140}, pinned=True)  # its button is another one now
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Unpin version 140")).to_be_focused()
    newer(147, serving=140, pinned=False)  # it has no button now
    expect(page.locator("td:focus")).to_have_text("serving")


def test_the_pinned_version_can_be_unpinned(console: Console, opened: Opened) -> None:
    world = worlds.learning()
    world["state"]["versions"] |= {"aliases": {"stable": 141}, "pinned": True}  # a server still has 142
    server = console(world)
    page = live(opened(f"{server.url}/#token={TOKEN}"))

    page.get_by_role("button", name="Unpin version").click()
    page.get_by_role("dialog").get_by_role("button", name="Unpin v141").click()

    expect(page.locator("#versions-said")).to_have_text("Version 141 is pinned no more.")
    assert server.asked[-1][1:] == ("/api/promote", {"number": 141})


def test_a_token_in_the_address_is_kept_and_removed(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    page = live(opened(f"{server.url}/#token={TOKEN}"))

    assert page.evaluate("location.href") == f"{server.url}/"
    page.get_by_role("button", name="Roll back…").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()

    expect(page.locator("#versions-said")).to_have_text("Rolled back to the version before.")


def test_try_it_ranks_the_request_and_shows_curl_and_python(console: Console, opened: Opened) -> None:
    server = console(worlds.learning())
    page = live(opened(server.url))
    expect(page.locator("#try-json")).to_have_value(re.compile("9007199254740993"))

    page.get_by_role("button", name="Rank", exact=True).click()

    expect(page.locator("#try tbody tr")).to_have_count(10)
    expect(page.locator("#try tbody tr").nth(3)).to_contain_text("no row: item")
    expect(page.locator("#try .said")).to_contain_text("of these, on disk and not read: late 1.")
    assert '"user":9007199254740993' in page.locator("pre").first.inner_text()
    python = page.locator("pre").nth(1).inner_text()
    compile(python, "snippet", "exec")
    assert '"user": 9007199254740993' in python
    page.locator("#try-json").fill('{"candidates": ')
    expect(page.locator("#try .wrong")).to_contain_text("not a request yet")


def test_copied_commands_carry_token_and_certificate(console: Console, opened: Opened) -> None:
    """No token stands in it: it comes from a file."""
    world = worlds.learning()
    world["state"]["asking"] = {"scheme": "https", "token": True, "certificate": True}
    page = live(opened(console(world).url))
    curl, python = page.locator("pre").first, page.locator("pre").nth(1)

    expect(curl).to_contain_text("curl -s https://127.0.0.1:")
    shell = curl.inner_text()
    words = shlex.split(shell, comments=True)
    assert words[words.index("--cacert") + 1] == "ca.pem"
    assert words[words.index("--cert") + 1 : words.index("--cert") + 4] == [
        "client.pem",
        "--key",
        "client.key",
    ]
    assert "@rank.header" in words
    assert "Bearer" not in " ".join(words)
    code = python.inner_text()
    compile(code, "snippet", "exec")
    for part in (
        "https://127.0.0.1:",
        'token=Path("rank.token")',
        'ca_file="ca.pem"',
        'key_file="client.key"',
    ):
        assert part in code


def test_copied_commands_are_short_without_authentication(console: Console, opened: Opened) -> None:
    page = live(opened(console(worlds.learning()).url))

    expect(page.locator("pre").first).to_contain_text("curl -s http://127.0.0.1:")
    words = shlex.split(page.locator("pre").first.inner_text())
    assert not {"--cacert", "--cert", "@rank.header"} & set(words)
    assert "token" not in page.locator("pre").nth(1).inner_text()


def test_memory_stays_flat_over_many_updates(console: Console, opened: Opened) -> None:
    server = console(worlds.learning(), every_s=0.01)
    page = live(opened(server.url))
    cdp = page.context.new_cdp_session(page)

    def used_after(name: str, updates: int) -> float:
        for i in range(updates):
            at = int(time.time() * 1000) - 20_000 + i * 10
            for record in (worlds.vitals(at), worlds.clicks(at), worlds.window("random", at)):
                server.publish(record)
        wait_until("all records are sent", lambda: not server.waiting(), within_s=60)
        server.world["state"]["model"] = name
        expect(page.locator("#model")).to_have_text(name)
        cdp.send("HeapProfiler.collectGarbage")
        return float(cdp.send("Runtime.getHeapUsage")["usedSize"]) / 1e6

    def load_history() -> None:  # with the records since, what the page holds goes up and down
        for span in ("1 h", "5 min"):
            with page.expect_response(lambda answer: "/api/history" in answer.url):
                page.get_by_label(span, exact=True).check(force=True)

    used_after("warm", 1_500)
    load_history()
    before = used_after("before", 1)
    full = used_after("many", 4_500)
    load_history()
    after = used_after("after", 1)
    assert after - before < 1.0, f"{before:.1f} MB before, {after:.1f} MB after"
    assert full - before < 5.0, f"{before:.1f} MB before, {full:.1f} MB while records arrive"
