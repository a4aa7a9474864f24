// Quality over time: AUC and normalised entropy of the model beside popularity; calibration has a panel of its own.

import { around, TimeChart } from "./chart.js";
import { byId } from "./dom.js";
import { ago, fixed, whole } from "./format.js";
import { lastOf, num, record, records } from "./read.js";
import { beside, columns } from "./series.js";
import { marksOf } from "./learning.js";

const MODEL = { name: "model", colour: "--accent", width: 2 };
const BASE = { name: "popularity", colour: "--ink-2", dash: [6, 4], look: "dashed" };
const OPEN = {
  name: "window still open",
  colour: "--muted",
  dash: [2, 3],
  look: "dotted",
  points: true,
  spanGaps: true,
};
const EMPTY = (what) =>
  `${what} appears here when the first window closes: once the label's window and grace have passed, so that its negatives are in.`;

/** Which windows stand for the choice: what was served on explored requests; else what was served; else training. */
export function chosen(app) {
  const label = app.label();
  if (byId("of").querySelector("input:checked").value === "random")
    return { of: "random", words: "random slates" };
  const of =
    app.history.of("served", label).length || app.totals("served").n !== undefined ? "served" : "training";
  return { of, words: of === "served" ? "everything served" : "every sample before it was trained on" };
}

/** Popularity is scored on random slates; beside other samples it says nothing, unless nothing is explored at all. */
function baseline(app, of, label) {
  const scored = of === "random" || app.history.of("random", label).length === 0;
  return scored ? app.history.of("popularity", label) : [];
}

const RECENT_MS = 120_000;

/** Over the windows that closed in the last two minutes that are known, weighted by samples: {auc, calibration, n} or null. */
export function recent(windows) {
  const until = windows.length ? windows[windows.length - 1].stop_ms : 0;
  const sums = { n: 0, auc: 0, aucOf: 0, predicted: 0, labelled: 0 };
  for (const w of windows.filter((x) => x.stop_ms > until - RECENT_MS)) {
    const [n, auc, ratio, rate] = ["n", "auc", "calibration", "mean_label"].map((k) => num(w.measures[k]));
    if (n === null || n <= 0) continue;
    sums.n += n;
    if (auc !== null) {
      sums.auc += n * auc;
      sums.aucOf += n;
    }
    if (ratio === null || rate === null) continue;
    sums.labelled += n * rate;
    sums.predicted += n * rate * ratio;
  }
  if (sums.n === 0) return null;
  return {
    n: sums.n,
    auc: sums.aucOf ? sums.auc / sums.aucOf : null,
    calibration: sums.labelled > 0 ? sums.predicted / sums.labelled : null,
  };
}

export class Quality {
  constructor() {
    const make = (title, range, cap, empty) =>
      new TimeChart(byId("quality"), {
        title,
        series: [MODEL, BASE, OPEN],
        format: (v) => fixed(v),
        range,
        cap,
        height: 396,
        empty,
      });
    this.charts = [
      {
        measure: "auc",
        short: "AUC",
        better: "higher is better, 0.5 is chance",
        chart: make("AUC", around(0.08), null, EMPTY("AUC")),
      },
      {
        measure: "ne",
        short: "NE",
        better: "lower is better, 1 is the mean rate alone",
        chart: make("Normalised entropy", around(0.06), 1.5, EMPTY("NE")),
      },
    ];
  }

  draw(app) {
    const label = app.label();
    const { of, words } = chosen(app);
    const rows = beside({ model: app.history.of(of, label), base: baseline(app, of, label) });
    const open = records(record(record(app.state).quality).open).find(
      (w) => w.of === of && w.label === label,
    );
    for (const c of this.charts) {
      const read = (kind) => (r) => num(record(record(r.of[kind]).measures)[c.measure]);
      const data = columns(rows, (r) => r.stop_ms, [read("model"), read("base"), () => null]);
      const openFrom = withOpen(data, open, c.measure, app.now());
      const view = { ...app.view(), marks: marksOf(app).filter((m) => !m.short), openFrom };
      c.chart.draw(data, view, caption(app, c, { rows, read, open, words }));
    }
  }
}

/** Append what the open window shows so far, joined to the last closed one; returns where the grey begins (ms) or null. */
function withOpen(data, open, measure, now) {
  const closed = data[0].length ? data[0][data[0].length - 1] * 1000 : null;
  const value = num(record(record(open).measures)[measure]);
  const start = num(record(open).start_ms);
  if (value === null || start === null || start > now || (closed !== null && now <= closed)) return closed;
  if (closed !== null) data[3][data[3].length - 1] = data[1][data[1].length - 1];
  data[0].push(Math.max(now, start) / 1000);
  data[1].push(null);
  data[2].push(null);
  data[3].push(value);
  return closed === null ? start : closed;
}

function caption(app, { measure, short, better }, { rows, read, open, words }) {
  const last = lastOf(rows, (r) => read("model")(r) !== null);
  const soFar = num(record(record(open).measures)[measure]);
  const n = num(record(record(open).measures).n);
  const opened =
    soFar === null
      ? ""
      : ` The open window shows ${fixed(soFar)} so far${n === null ? "" : ` (${whole(n)} samples)`}.`;
  if (last === null)
    return `${EMPTY(short)} Choose ${words === "random slates" ? "all samples" : "random slates"} to see the others.${opened}`;
  const base = read("base")(last);
  const beside = base === null ? "" : `; popularity ${fixed(base)}`;
  return `${short} on ${words} ${fixed(read("model")(last))}${beside} in the window that ended ${ago(last.stop_ms, app.now())} (${better}).${opened}`;
}
