// Freshness: one action on its way into the served prediction, and how long that took over time.

import { fromZero, TimeChart } from "./chart.js";
import { byId, el, onWidth, say, svg } from "./dom.js";
import { ago, duration, rounds } from "./format.js";
import { lastOf, num, record, records, text } from "./read.js";
import { columns } from "./series.js";

const STAGES = ["logged", "joined", "trained", "published", "served"];
const ROW = 26;
const LABEL = 74;
const VALUE = 58;
const EMPTY =
  "An action is followed by its offsets every few seconds once actions flow and a version is served; its stages appear here.";

export class Freshness {
  constructor() {
    this.host = el("div", { class: "drawing waterfall" });
    this.caption = el("figcaption", {}, EMPTY);
    this.figure = el(
      "figure",
      { class: "void" },
      el("h3", {}, "Waterfall of an action"),
      this.host,
      this.caption,
    );
    byId("freshness").append(this.figure);
    this.chart = new TimeChart(byId("freshness"), {
      title: "Over time",
      series: [
        { name: "action → served", colour: "--accent", width: 2 },
        { name: "freshness", colour: "--ink-2", dash: [6, 4], look: "dashed" },
      ],
      format: (v) => duration(v),
      range: fromZero(100),
      cap: 6,
      height: 120,
      empty: "Freshness over time appears here five seconds after the console started.",
    });
    this.stages = [];
    onWidth(this.host, (width) => this.#waterfall((this.width = width)));
  }

  update(state, app) {
    const trace = record(state.trace);
    const found = Object.fromEntries(records(trace.stages, 20).map((s) => [text(s.stage, 20), s]));
    this.stages = STAGES.map((name) => ({
      name,
      ms: num(record(found[name]).ms),
      p90: num(record(found[name]).p90),
    }));
    const known = this.stages.filter((s) => s.ms !== null);
    this.figure.classList.toggle("void", known.length === 0);
    const n = num(trace.n);
    const steps = known.map((s) => `${s.name} after ${duration(s.ms)}`).join(", ");
    say(
      this.caption,
      known.length === 0
        ? EMPTY
        : `Median of the last ${n ?? ""} actions followed: ${steps}; last seen ${ago(num(trace.at_ms), app.now())}.${failed(trace, app)}`,
    );
    this.#waterfall(this.width);
  }

  draw(app) {
    const read = [(v) => num(record(v.trace).served), (v) => num(v.freshness_ms)];
    const last = lastOf(app.history.vitals, (v) => read[1](v) !== null || read[0](v) !== null);
    const said =
      last === null
        ? "Freshness over time appears here five seconds after the console started."
        : `An action takes ${duration(read[0](last))} into the served prediction; what is served has learned from events ${duration(read[1](last))} old.`;
    this.chart.draw(
      columns(app.history.vitals, (v) => v.time_ms, read),
      app.view(),
      said,
    );
  }

  #waterfall(width) {
    if (!width) return;
    const key = JSON.stringify([width, this.stages]);
    if (key === this.key) return;
    this.key = key;
    this.host.replaceChildren(drawn(width, this.stages));
  }
}

/** Of an action that was given up. */
function failed(trace, app) {
  const f = record(trace.failed);
  return text(f.stage)
    ? ` One was not ${text(f.stage, 20)} ${ago(num(f.at_ms), app.now())}: ${text(f.reason, 160)}.`
    : "";
}

/** Bars that begin where the stage before ended; a thin line to the 90th percentile. */
function drawn(width, stages) {
  const height = ROW * stages.length + 18;
  const root = svg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "aria-hidden": "true",
    focusable: "false",
  });
  const most = Math.max(1, ...stages.map((s) => Math.max(s.ms ?? 0, s.p90 ?? 0)));
  const x = (ms) => LABEL + (Math.min(most, Math.max(0, ms)) / most) * (width - LABEL - VALUE);
  for (const tick of rounds(most, 4)) {
    const at = x(tick);
    root.append(
      svg("line", { class: "grid", x1: at, x2: at, y1: 0, y2: height - 16 }),
      svg(
        "text",
        { class: "tick", x: at, y: height - 3, "text-anchor": tick === 0 ? "start" : "middle" },
        tick === 0 ? "0" : duration(tick),
      ),
    );
  }
  let before = 0;
  stages.forEach(({ name, ms, p90 }, i) => {
    const middle = i * ROW + ROW / 2;
    root.append(svg("text", { class: "name", x: 0, y: middle + 4 }, name));
    if (ms === null) {
      root.append(svg("text", { class: "tick", x: x(before) + 4, y: middle + 4 }, "not yet"));
      return;
    }
    if (p90 !== null && p90 > ms)
      root.append(svg("path", { class: "whisker", d: `M${x(ms)} ${middle}H${x(p90)}m0 -4v8` }));
    root.append(
      svg("rect", {
        class: `step s${i}`,
        x: x(before),
        y: middle - 7,
        width: Math.max(2, x(ms) - x(before)),
        height: 14,
        rx: 2,
      }),
      svg("text", { class: "figure", x: width, y: middle + 4, "text-anchor": "end" }, duration(ms)),
    );
    before = Math.max(before, ms);
  });
  return root;
}
