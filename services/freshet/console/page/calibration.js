// Calibration: the reliability curve with the samples of each bin, and predicted / observed over time.

import { around, TimeChart } from "./chart.js";
import { byId, el, onWidth, say, svg } from "./dom.js";
import { ago, count, fixed, percent, whole } from "./format.js";
import { list, lastOf, num, record } from "./read.js";
import { columns } from "./series.js";
import { chosen } from "./quality.js";

const HEIGHT = 270;
const BARS = 58; // of it, for samples per bin
const FEW = 20; // a bin of fewer samples says little: it is drawn small, and is no part of the line
const EMPTY =
  "The curve appears here when the first window closes: predictions in up to 15 bins against how often the label came true.";

export class Calibration {
  constructor() {
    this.host = el("div", { class: "drawing reliability" });
    this.caption = el("figcaption", {}, EMPTY);
    this.figure = el("figure", { class: "void" }, el("h3", {}, "Reliability"), this.host, this.caption);
    byId("calibration").append(this.figure);
    this.chart = new TimeChart(byId("calibration"), {
      title: "Predicted / observed",
      series: [{ name: "ratio", colour: "--accent", width: 2 }],
      format: (v) => fixed(v, 2),
      range: around(0.4, 1),
      cap: 2.5,
      height: 110,
      empty:
        "The ratio over time appears here when the first window closes; 1 is right, above 1 promises too much.",
    });
    this.bins = [];
    onWidth(this.host, (width) => this.#curve((this.width = width)));
  }

  draw(app) {
    const label = app.label();
    const bins = list(record(record(record(app.state).quality).reliability)[label], 40);
    this.bins = bins.map((b) => list(b, 3).map(num)).filter(([n, p, o]) => n > 0 && isShare(p) && isShare(o));
    this.figure.classList.toggle("void", this.bins.length === 0);
    say(this.caption, this.#words());
    this.#curve(this.width);
    const { of, words } = chosen(app);
    const windows = app.history.of(of, label);
    const read = (w) => num(record(w.measures).calibration);
    const last = lastOf(windows, (w) => read(w) !== null);
    const said =
      last === null
        ? "The ratio over time appears here when the first window closes; 1 is right, above 1 promises too much."
        : `${fixed(read(last), 2)} predicted for each one observed, on ${words}, in the window that ended ${ago(last.stop_ms, app.now())}; 1 is right.`;
    this.chart.draw(
      columns(windows, (w) => w.stop_ms, [read]),
      app.view(),
      said,
    );
  }

  #words() {
    if (this.bins.length === 0) return EMPTY;
    const n = this.bins.reduce((sum, b) => sum + b[0], 0);
    const off = this.bins.reduce((sum, b) => sum + b[0] * Math.abs(b[1] - b[2]), 0) / n;
    const top = lastOf(this.bins, (b) => b[0] >= FEW);
    return (
      `${whole(n)} samples in ${this.bins.length} bins: predictions are ${fixed(100 * off, 1)} percentage points off on average. ` +
      (top === null
        ? ""
        : `Of the highest bin, predicted ${percent(top[1])}, ${percent(top[2])} came true (n = ${whole(top[0])}).`)
    );
  }

  #curve(width) {
    if (!width) return;
    const key = JSON.stringify([width, this.bins]);
    if (key === this.key) return;
    this.key = key;
    this.host.replaceChildren(drawn(width, this.bins));
  }
}

/**
 * Predicted on x, observed on y, both on a logit scale, over which the bins are even: rare and common labels are equally
 * legible. Whiskers are 95 % intervals; a bin of few samples is a hollow dot without one. Bars below count samples.
 */
function drawn(width, bins) {
  const box = { left: 46, right: width - 20, top: 8, bottom: HEIGHT - BARS - 22 };
  const sure = bins.filter((b) => b[0] >= FEW);
  const [low, high] = limits(bins, sure);
  const part = (p) => (logit(Math.min(Math.max(p, low), high)) - logit(low)) / (logit(high) - logit(low));
  const x = (p) => box.left + part(p) * (box.right - box.left);
  const y = (p) => box.bottom - part(p) * (box.bottom - box.top);
  const root = svg("svg", {
    width,
    height: HEIGHT,
    viewBox: `0 0 ${width} ${HEIGHT}`,
    "aria-hidden": "true",
    focusable: "false",
  });
  for (const tick of ticks(low, high, x, 44))
    root.append(
      svg("text", { class: "tick", x: x(tick), y: box.bottom + 15, "text-anchor": "middle" }, label(tick)),
    );
  for (const tick of ticks(low, high, y, 26)) {
    root.append(
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, label(tick)),
    );
  }
  root.append(
    svg("line", { class: "right", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }),
    svg("text", { class: "tick", x: box.left + 5, y: box.top + 9 }, "↑ observed"),
    svg(
      "text",
      { class: "tick", x: box.right, y: HEIGHT - BARS + 16, "text-anchor": "end" },
      "predicted, logit scale →",
    ),
  );
  if (bins.length === 0) return root;
  const inside = (v) => v >= low && v <= high;
  const largest = Math.max(...bins.map((b) => b[0]));
  const bar = Math.max(2, Math.min(18, ((box.right - box.left) / bins.length) * 0.7));
  for (const [n, p, o] of bins) {
    const tall = Math.max(2, (n / largest) * (BARS - 26));
    if (inside(p))
      root.append(
        svg("rect", { class: "bar", x: x(p) - bar / 2, width: bar, y: HEIGHT - tall, height: tall, rx: 1 }),
      );
    if (n >= FEW) {
      const [from, to] = interval(n, o);
      root.append(svg("line", { class: "whisker", x1: x(p), x2: x(p), y1: y(from), y2: y(to) }));
    }
  }
  root.append(
    svg("path", {
      class: "curve",
      d: sure.map(([, p, o], i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(o).toFixed(1)}`).join(""),
    }),
  );
  for (const [n, p, o] of bins) {
    if (n >= FEW) root.append(svg("circle", { class: "dot", cx: x(p), cy: y(o), r: 4 }));
    else if (inside(p) && inside(o))
      root.append(svg("circle", { class: "dot few", cx: x(p), cy: y(o), r: 2.5 }));
  }
  root.append(
    svg(
      "text",
      { class: "tick", x: box.left, y: HEIGHT - BARS + 16 },
      `n per bin, at most ${count(largest)}`,
    ),
  );
  return root;
}

const label = (tick) => `${Number((100 * tick).toPrecision(3))} %`;

const isShare = (v) => v !== null && v >= 0 && v <= 1;

const logit = (p) => Math.log(p / (1 - p));

/** The shares between which everything that is sure lies, no closer than one in 20,000 to the ends. */
function limits(bins, sure) {
  const found = (sure.length ? sure : bins).flatMap(([, p, o]) => [p, o]).filter((v) => v > 0 && v < 1);
  if (found.length === 0) return [0.01, 0.9];
  const shares = found.map((v) => Math.min(1 - 1e-4, Math.max(1e-4, v)));
  const [low, high] = [Math.min(...shares), Math.max(...shares)];
  const widen = (p, by) => 1 / (1 + Math.exp(-(logit(p) + by)));
  return [Math.max(5e-5, widen(low, -0.6)), Math.min(1 - 5e-5, widen(high, 0.6))];
}

/** Wilson's 95 % interval of a share. */
function interval(n, share) {
  const z = 1.96;
  const middle = (share + (z * z) / (2 * n)) / (1 + (z * z) / n);
  const half = (z / (1 + (z * z) / n)) * Math.sqrt((share * (1 - share)) / n + (z * z) / (4 * n * n));
  return [middle - half, middle + half];
}

const TICKS = [
  0.5, 0.01, 0.1, 0.9, 0.99, 0.001, 0.999, 0.0001, 0.9999, 0.03, 0.25, 0.75, 0.05, 0.2, 0.02, 0.95, 0.15, 0.3,
];

/** Round shares between the limits, the roundest first, none closer than `apart` px to another. */
function ticks(low, high, at, apart) {
  const chosen = [];
  for (const tick of TICKS) {
    if (tick >= low && tick <= high && chosen.every((c) => Math.abs(at(c) - at(tick)) >= apart))
      chosen.push(tick);
  }
  return chosen;
}
