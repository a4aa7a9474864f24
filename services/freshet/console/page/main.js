// The page's one composition root: a feed fills the history, and panels draw from state and history.

import { Calibration } from "./calibration.js";
import { byId, el, mark, say, show } from "./dom.js";
import { Feed, getJson } from "./feed.js";
import { duration } from "./format.js";
import { Freshness } from "./freshness.js";
import { Glance } from "./glance.js";
import { History } from "./history.js";
import { Learning } from "./learning.js";
import { Letters, Segments, Services, Tables, Wires } from "./lists.js";
import { Pipeline } from "./pipeline.js";
import { Quality } from "./quality.js";
import { num, record, records, text } from "./read.js";
import { takeToken } from "./token.js";
import { Try } from "./try.js";
import { Versions } from "./versions.js";

const DAY_S = 86_400;
const SPAN = "freshet.span";
const CHARTS_MS = 5_000; // charts move on at least so often, whether records come or not
const LOOK_BACK_MS = 600_000; // between looks whether there is a day's history to show

/** What every panel may ask. Times are the server's: `now` is its clock, carried on by ours between two states. */
class App {
  constructor() {
    this.state = null;
    this.spanMs = 300_000;
    this.history = new History(this.spanMs);
    this.clock = { server: Date.now(), here: performance.now() };
  }

  /** Set the clock from what the server answered: ours may have stood still while the machine slept. */
  setClock(answer) {
    const now = num(answer.now_ms);
    if (now !== null) this.clock = { server: now, here: performance.now() };
  }

  now() {
    return this.clock.server + (performance.now() - this.clock.here);
  }

  /** What charts show: the span, or less while there is less; a minute at least. */
  view() {
    const to = this.now();
    const oldest = Math.min(to - 60_000, this.history.oldest() - 5_000);
    return { from: Math.max(to - this.spanMs, oldest), to };
  }

  /** All labels: [{name, number, given}]. */
  labels() {
    const labels = records(record(record(this.state).quality).labels, 50);
    return labels.map((l) => ({
      name: text(l.name, 100),
      number: l.kind === "number",
      given: text(l.given, 100),
    }));
  }

  /** The label that is picked. */
  picked() {
    const labels = this.labels();
    const name = byId("label").value;
    return labels.find((l) => l.name === name) ?? labels[0] ?? { name: "", number: false, given: "" };
  }

  /** The name of the label that quality is shown of. */
  label() {
    return this.picked().name;
  }

  /** Measures since the beginning, of one kind and the chosen label. */
  totals(of) {
    return record(record(record(record(record(this.state).quality).totals)[of])[this.label()]);
  }
}

const app = new App();
const glance = new Glance();
const freshness = new Freshness();
const [learning, quality, calibration] = [new Learning(), new Quality(), new Calibration()];
const byState = [
  new Pipeline(),
  new Versions(app),
  new Segments(app),
  new Services(app),
  new Tables(),
  new Wires(),
  new Letters(app),
  new Try(app),
  freshness,
];
let due = true; // charts have something new
let drawn = 0;

const feed = new Feed(300, {
  history: (answer) => {
    app.setClock(answer);
    app.history.load(answer, app.now());
    due = true;
  },
  state: (state) => {
    app.setClock(state);
    app.state = state;
    draw();
  },
  record: (r) => {
    app.history.add(r, app.now());
    due = true;
    if (!app.history.full) return;
    app.history.full = false;
    feed.refresh();
  },
  version: (v) => {
    app.history.addVersion(v, app.now());
    due = true;
  },
  status: (status) => {
    glance.connection(status);
    show(byId("lost"), status === "lost");
    mark(byId("main"), "data-stale", status === "lost" ? "yes" : null);
    age();
  },
});

/** Everything that hangs on the state; charts only when there is something new. Nothing while nobody looks. */
function draw() {
  if (document.hidden || app.state === null) return;
  labels();
  glance.update(app.state, app);
  for (const panel of byState) panel.update(app.state, app);
  if (!due && performance.now() - drawn < CHARTS_MS) return;
  due = false;
  drawn = performance.now();
  for (const panel of [learning, quality, calibration, freshness]) panel.draw(app);
}

function labels() {
  const names = app.labels().map((l) => l.name);
  const pick = byId("label");
  show(byId("label-pick"), names.length > 1);
  if (pick.dataset.key === JSON.stringify(names)) return;
  pick.dataset.key = JSON.stringify(names);
  pick.replaceChildren(...names.map((n) => el("option", { value: n }, n)));
}

function age() {
  if (feed.status !== "lost") return;
  const words =
    feed.lastState === null
      ? "Nothing has arrived yet."
      : `What you see is ${duration(performance.now() - feed.lastState)} old.`;
  say(
    byId("lost-what"),
    feed.lastState === null
      ? "No connection to the console, trying again."
      : "Connection lost, trying again.",
  );
  say(byId("lost-age"), `${words} Is freshet running? freshet status tells.`);
}

function redraw() {
  due = true;
  draw();
}

/** Which spans can be shown: a day only where the history is longer than an hour. */
async function lookBack() {
  const input = byId("span").querySelector(`[value="${DAY_S}"]`);
  try {
    const answer = await getJson(`/api/history?span_s=${DAY_S}`);
    app.setClock(answer);
    const oldest = num(record(records(answer.vitals)[0]).time_ms);
    input.disabled = oldest === null || app.now() - oldest < 3_600_000;
  } catch {
    input.disabled = input.disabled || !input.checked;
  }
  mark(input.parentElement, "title", input.disabled ? "There is less than an hour of history yet" : null);
}

function setSpan(seconds) {
  app.spanMs = app.history.spanMs = seconds * 1000;
  feed.setSpan(seconds);
  redraw();
}

function spans() {
  let kept = null;
  try {
    kept = localStorage.getItem(SPAN);
  } catch {
    // storage may be forbidden: the shortest span then
  }
  for (const input of byId("span").querySelectorAll("input")) {
    if (input.value === kept) {
      input.checked = true;
      app.spanMs = app.history.spanMs = Number(kept) * 1000;
      feed.spanS = Number(kept);
    }
    input.addEventListener("change", () => {
      try {
        localStorage.setItem(SPAN, input.value);
      } catch {
        // then it lasts until the page is closed
      }
      setSpan(Number(input.value));
    });
  }
}

takeToken();
spans();
lookBack();
setInterval(lookBack, LOOK_BACK_MS);
setInterval(age, 1_000);
byId("of").addEventListener("change", redraw);
byId("label").addEventListener("change", redraw);
document.addEventListener("visibilitychange", redraw);
feed.start();
