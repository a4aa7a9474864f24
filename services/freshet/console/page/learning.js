// Learning: the click rate, or another label's mean, of the model's slates beside random ones and the best possible,
// with what disturbed it.

import { around, fromZero, TimeChart } from "./chart.js";
import { byId, say } from "./dom.js";
import { ago, amount, part, percent, times } from "./format.js";
import { lastOf, num, record, text } from "./read.js";
import { beside, columns, share, shares } from "./series.js";

const MINUTE_MS = 60_000;
const MODEL = { name: "model", colour: "--accent", width: 2 };
const RANDOM = { name: "random", colour: "--ink-2", dash: [6, 4], look: "dashed" };
const BEST = { name: "best possible", colour: "--muted", dash: [2, 3], look: "dotted" };
const EMPTY = (name) =>
  `The ${name} appears here once the first window has closed and its actions are in: about 20 seconds after events begin to flow. ` +
  "Send events to the gateway, or start the simulator with freshet demo.";

/** What is shown: clicks, the rate of a label that is true or false, or the mean of one that is a number. */
export function figure(app) {
  const { name, number, given } = app.picked();
  const clicks = app.history.clicks.length > 0 || name === "" || (name === "click" && !number && !given);
  if (clicks) return { clicks, name: "click rate", format: percent, range: fromZero(0.01) };
  const of = given ? `${name} of ${given}` : name;
  if (number) return { clicks, name: `mean ${of}`, format: amount, range: around(1e-3, 0) };
  return { clicks, name: `rate of ${of}`, format: percent, range: fromZero(0.01) };
}

/** Windows of shown items as {stop_ms, model, random, best: [clicks, shown]}: from the simulator, else from serving's log. */
function slates(app) {
  const part = (x) => [num(record(x).clicks), num(record(x).impressions)];
  if (app.history.clicks.length) {
    return app.history.clicks.map((w) => ({
      stop_ms: w.stop_ms,
      model: part(w.model),
      random: part(w.random),
      best: part(w.best),
    }));
  }
  const of = (w) => {
    const m = record(record(w).measures);
    return num(m.mean_label) === null || num(m.n) === null ? [null, null] : [m.mean_label * m.n, m.n];
  };
  const label = app.label();
  const rows = beside({ model: app.history.of("served", label), random: app.history.of("random", label) });
  return rows.map((r) => ({
    stop_ms: r.stop_ms,
    model: of(r.of.model),
    random: of(r.of.random),
    best: [null, null],
  }));
}

/** Click rates over the last minute that is known: {model, random, best, stop_ms}, null where unknown. */
export function lastMinute(app) {
  const all = slates(app);
  const stop = all.length ? all[all.length - 1].stop_ms : null;
  const sums = { model: [0, 0], random: [0, 0], best: [0, 0] };
  for (const w of all.filter((x) => x.stop_ms > stop - MINUTE_MS)) {
    for (const name of Object.keys(sums)) {
      const [events, of] = w[name];
      if (num(events) === null || num(of) === null) continue;
      sums[name][0] += events;
      sums[name][1] += of;
    }
  }
  return { model: share(sums.model), random: share(sums.random), best: share(sums.best), stop_ms: stop };
}

export class Learning {
  constructor() {
    const marks = [
      { sign: "▼", name: "tastes drifted", look: "warn" },
      { sign: "■", name: "version held", look: "bad" },
      { sign: "\u00a0", name: "clicks still come in", look: "open" },
    ];
    this.chart = new TimeChart(byId("learning"), {
      title: "Click rate",
      series: [MODEL, RANDOM, BEST],
      format: percent,
      range: fromZero(0.01),
      height: 384,
      marks,
      empty: EMPTY("click rate"),
    });
  }

  draw(app) {
    const { name, format, range } = figure(app);
    Object.assign(this.chart, { format, range });
    say(this.chart.title, name[0].toUpperCase() + name.slice(1));
    const binMs = Math.max(10_000, app.spanMs / 120);
    const bins = shares(slates(app), binMs, ({ model, random, best }) => ({ model, random, best }));
    const read = ["model", "random", "best"].map((name) => (b) => share(b.sums[name]));
    say(
      byId("learning-sub"),
      app.history.clicks.length > 0
        ? "share of shown items that were clicked, by the simulator's count"
        : `${name}, of what was served`,
    );
    this.chart.draw(
      columns(bins, (b) => b.stop_ms, read),
      { ...app.view(), marks: marksOf(app), openFrom: lastOf(bins)?.stop_ms ?? null },
      caption(app),
    );
  }
}

/** Drifts as lines, held versions as signs at the top: a gate that holds for minutes leaves the chart legible. */
export function marksOf(app) {
  return [
    ...app.history.drifts.map((d) => ({ time_ms: d.time_ms, sign: "▼", colour: "--warn" })),
    ...app.history.versions
      .filter((v) => v.what === "held")
      .map((v) => ({ time_ms: v.time_ms, sign: "■", colour: "--bad", short: true })),
  ];
}

function caption(app) {
  const { model, random, best } = lastMinute(app);
  const { clicks, name, format } = figure(app);
  if (model === null && random === null) return EMPTY(name);
  const said = [
    "Over the last minute that is complete",
    clicks
      ? `${format(model)} of what the model showed was clicked`
      : `the ${name} of what the model showed was ${format(model)}`,
  ];
  if (random !== null)
    said.push(clicks ? `${format(random)} of random slates` : `that of random slates ${format(random)}`);
  if (best !== null) said.push(`${format(best)} would be possible`);
  let words = `${said.join(", ")}.`;
  if (model !== null && random > 0)
    words += ` That is ${times(model, random)} times random${best ? ` and ${part(model, best)} of the best possible` : ""}.`;
  const drift = lastOf(app.history.drifts);
  if (drift)
    words += ` Tastes drifted ${ago(drift.time_ms, app.now())}${text(drift.what) ? `: ${text(drift.what, 120)}` : ""}.`;
  const held = lastOf(app.history.versions, (v) => v.what === "held");
  if (held) words += ` Version ${held.number ?? "?"} was held ${ago(held.time_ms, app.now())}.`;
  return words;
}
