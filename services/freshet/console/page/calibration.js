// Calibration: the reliability curve with the samples of each bin, and predicted / observed over time.

import { around, TimeChart } from "./chart.js";
import { byId, el, onWidth, say, svg } from "./dom.js";
import { ago, count, fixed, percent, rounds, whole } from "./format.js";
import { list, lastOf, num, record } from "./read.js";
import { columns } from "./series.js";
import { chosen } from "./quality.js";

const HEIGHT = 270;
const BARS = 58; // of it, for samples per bin
const EMPTY = "The curve appears here when the first window closes: predictions in up to 15 bins against how often the label came true.";

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
      height: 110,
      empty: "The ratio over time appears here when the first window closes; 1 is right, above 1 promises too much.",
    });
    this.bins = [];
    onWidth(this.host, (width) => this.#curve((this.width = width)));
  }

  draw(app) {
    const label = app.label();
    const bins = list(record(record(record(app.state).quality).reliability)[label], 40);
    this.bins = bins.map((b) => list(b, 3).map(num)).filter((b) => b.length === 3 && b.every((x) => x !== null) && b[0] > 0);
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
    this.chart.draw(columns(windows, (w) => w.stop_ms, [read]), app.view(), said);
  }

  #words() {
    if (this.bins.length === 0) return EMPTY;
    const n = this.bins.reduce((sum, b) => sum + b[0], 0);
    const off = this.bins.reduce((sum, b) => sum + b[0] * Math.abs(b[1] - b[2]), 0) / n;
    const top = this.bins[this.bins.length - 1];
    return (
      `${whole(n)} samples in ${this.bins.length} bins: predictions are ${fixed(100 * off, 1)} percentage points off on average. ` +
      `Of the highest bin, predicted ${percent(top[1])}, ${percent(top[2])} came true (n = ${whole(top[0])}).`
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

/** Predicted on x, observed on y, both from 0; whiskers are 95 % intervals, dots grow with n, bars below count samples. */
function drawn(width, bins) {
  const box = { left: 46, right: width - 10, top: 8, bottom: HEIGHT - BARS - 22 };
  const most = bins.length ? Math.min(1, Math.max(0.01, ...bins.map((b) => Math.max(b[1], b[2]))) * 1.08) : 1;
  const x = (p) => box.left + (clamp(p) / most) * (box.right - box.left);
  const y = (p) => box.bottom - (clamp(p) / most) * (box.bottom - box.top);
  const clamp = (p) => Math.min(most, Math.max(0, p));
  const root = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true", focusable: "false" });
  for (const tick of rounds(most, 4)) {
    root.append(
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, percent(tick)),
      svg("text", { class: "tick", x: x(tick), y: box.bottom + 15, "text-anchor": "middle" }, percent(tick)),
    );
  }
  root.append(svg("line", { class: "right", x1: x(0), y1: y(0), x2: x(most), y2: y(most) }));
  if (bins.length === 0) return root;
  const largest = Math.max(...bins.map((b) => b[0]));
  const step = (box.right - box.left) / bins.length;
  bins.forEach(([n, p, o], i) => {
    const spread = 1.96 * Math.sqrt(Math.max(o * (1 - o), 1 / n) / n);
    const high = Math.max(2, (n / largest) * (BARS - 26));
    root.append(
      svg("line", { class: "whisker", x1: x(p), x2: x(p), y1: y(o - spread), y2: y(o + spread) }),
      svg("circle", { class: "dot", cx: x(p), cy: y(o), r: 2.5 + 2.5 * Math.sqrt(n / largest) }),
      svg("rect", { class: "bar", x: box.left + i * step + 1, width: Math.max(1, step - 2), y: HEIGHT - high, height: high, rx: 1 }),
    );
  });
  root.append(
    svg("path", { class: "curve", d: bins.map(([, p, o], i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(o).toFixed(1)}`).join("") }),
    svg("text", { class: "tick", x: box.left, y: HEIGHT - BARS + 16 }, `n per bin, at most ${count(largest)}`),
    svg("text", { class: "tick", x: box.right, y: box.bottom - 6, "text-anchor": "end" }, "predicted →"),
    svg("text", { class: "tick", x: box.left + 5, y: box.top + 9 }, "↑ observed"),
  );
  return root;
}
