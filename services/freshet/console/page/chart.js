// A chart over time in a <figure>: uPlot for the drawing, words in the caption, a legend that follows the shared cursor.

import { el, onWidth, say } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 190;
const NARROW = 400; // on a phone a chart is at most LOW high
const LOW = 220;
const charts = new Set();

/** A custom property of the page's theme, as the canvas needs it. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

document.addEventListener("freshet:theme", () => {
  for (const chart of charts) chart.rebuild();
});

export class TimeChart {
  /**
   * series: [{name, colour: "--accent", dash?, width?, quiet?}] in the order of the columns given to `draw`.
   * format: a value as text. range: (min, max) -> [low, high] of the y axis. marks: [{sign, name, look}] that the
   * legend explains. cap: the axis ends at this many times the median, so that one wild window does not flatten all others;
   * the caption says how many lie above.
   */
  constructor(host, { title, series, format, range, height = HEIGHT, marks = [], cap = null, empty }) {
    Object.assign(this, { series, format, range, cap });
    this.top = Infinity;
    this.data = [[], ...series.map(() => [])];
    this.view = { from: 0, to: 1, marks: [], openFrom: null };
    this.values = series.map((s) => el("b", {}, "–"));
    const keys = series.map((s, i) => el("span", { class: "key" }, line(s), `${s.name} `, this.values[i]));
    const signs = marks.map((m) =>
      el("span", { class: "key" }, el("i", { class: `sign ${m.look}` }, m.sign), m.name),
    );
    this.when = el("span", { class: "when", "aria-hidden": "true" }, "latest");
    this.plot = el("div", { class: "plot", "aria-hidden": "true" });
    this.title = el("h3", {}, title);
    this.caption = el("figcaption", {}, empty);
    const legend = el("div", { class: "legend", "aria-hidden": "true" }, ...keys, ...signs);
    this.figure = el(
      "figure",
      {},
      el("div", { class: "title" }, this.title, legend, this.when),
      this.plot,
      this.caption,
    );
    host.append(this.figure);
    charts.add(this);
    this.#fit(height);
    onWidth(this.plot, (width) => {
      this.#fit(width < NARROW ? Math.min(height, LOW) : height);
      if (this.u) this.u.setSize({ width, height: this.height });
      else this.rebuild();
    });
  }

  /** Show these columns over [from, to] (ms), with marks [{time_ms, sign, colour, short?}] and the open part greyed. */
  draw(data, view, caption) {
    this.data = data;
    this.view = { marks: [], openFrom: null, ...view };
    const values = data
      .slice(1)
      .flat()
      .filter((v) => v !== null);
    this.top = this.cap === null || values.length === 0 ? Infinity : this.cap * median(values);
    const above = values.filter((v) => v > this.top).length;
    say(
      this.caption,
      above
        ? `${caption} ${above === 1 ? "One point lies" : `${above} points lie`} above the chart.`
        : caption,
    );
    this.figure.classList.toggle("void", data[0].length === 0);
    if (this.u) this.u.setData(data);
    else this.rebuild();
    this.#values(null);
  }

  #fit(height) {
    this.height = height;
    this.plot.style.height = `${height}px`;
  }

  rebuild() {
    const width = Math.floor(this.plot.clientWidth);
    if (width === 0) return;
    this.u?.destroy();
    this.u = new window.uPlot(this.#options(width), this.data, this.plot);
  }

  #options(width) {
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = {
      stroke: colour("--muted"),
      font,
      ticks: { show: false },
      grid: { stroke: colour("--grid"), width: 1 },
    };
    return {
      width,
      height: this.height,
      legend: { show: false },
      padding: [14, 16, 0, 0],
      cursor: {
        y: false,
        drag: { x: false, y: false, setScale: false },
        sync: { key: "time", setSeries: false },
        points: { size: 7, width: 2, fill: colour("--panel") },
      },
      scales: {
        x: { time: true, range: () => [this.view.from / 1000, this.view.to / 1000] },
        y: { range: (u, low, high) => this.range(low, high === null ? null : Math.min(high, this.top)) },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 26,
          gap: 7,
          space: (u) => (u.width < NARROW ? 48 : 60),
          values: (u, ticks) => ticks.map((t) => clock(t * 1000, t % 60 !== 0)),
        },
        {
          ...axis,
          size: 52,
          gap: 6,
          space: 34,
          values: (u, ticks) => ticks.map((t) => this.format(t).replace(/\.0+(?= )/, "")),
        },
      ],
      series: [
        {},
        ...this.series.map((s) => ({
          label: s.name,
          stroke: colour(s.colour),
          width: s.width ?? 1.5,
          dash: s.dash,
          spanGaps: s.spanGaps ?? false,
          points: { show: s.points ?? undefined, size: 4 },
        })),
      ],
      hooks: {
        drawClear: [(u) => this.#open(u)],
        draw: [(u) => this.#marks(u)],
        setCursor: [(u) => this.#values(u.cursor.idx)],
      },
    };
  }

  /** The window that is still open: what it shows can change. */
  #open(u) {
    const from = this.view.openFrom;
    if (from === null || from >= this.view.to) return;
    const { left, top, width, height } = u.bbox;
    const x = Math.max(left, u.valToPos(from / 1000, "x", true));
    if (!(x < left + width)) return;
    u.ctx.save();
    u.ctx.fillStyle = colour("--open");
    u.ctx.fillRect(x, top, left + width - x, height);
    u.ctx.restore();
  }

  #marks(u) {
    const { left, top, width, height } = u.bbox;
    const scale = window.devicePixelRatio;
    u.ctx.save();
    u.ctx.font = `${10 * scale}px sans-serif`;
    u.ctx.textAlign = "center";
    for (const m of this.view.marks) {
      const x = Math.round(u.valToPos(m.time_ms / 1000, "x", true));
      if (!(x >= left && x <= left + width)) continue;
      u.ctx.strokeStyle = u.ctx.fillStyle = colour(m.colour);
      u.ctx.lineWidth = scale;
      u.ctx.setLineDash([3 * scale, 3 * scale]);
      u.ctx.beginPath();
      u.ctx.moveTo(x, top);
      u.ctx.lineTo(x, m.short ? top + 4 * scale : top + height);
      u.ctx.stroke();
      u.ctx.fillText(m.sign, x, top - 3 * scale);
    }
    u.ctx.restore();
  }

  /** Values under the cursor, or the latest ones. */
  #values(at) {
    const known = at !== null && at !== undefined && at < this.data[0].length;
    this.values.forEach((node, i) => {
      const column = this.data[i + 1];
      const value = known ? column[at] : column.findLast((v) => v !== null);
      say(node, this.format(value ?? null));
    });
    say(this.when, known ? `at ${clock(this.data[0][at] * 1000)}` : "latest");
  }
}

function line(series) {
  const node = el("i", { class: `line ${series.look ?? ""}` });
  node.style.setProperty("--line", `var(${series.colour})`);
  return node;
}

function median(values) {
  const sorted = Float64Array.from(values).sort();
  return sorted[sorted.length >> 1];
}

/** From zero to a little above the highest value. */
export const fromZero = (least) => (low, high) => [0, Math.max(least, (high ?? 0) * 1.12) || 1];

/** Around what is there, never closer than `least` apart; always with `keep` in view, if given. */
export const around =
  (least, keep = null) =>
  (low, high) => {
    if (low === null || high === null || low === undefined)
      return keep === null ? [0, 1] : [keep - least / 2, keep + least / 2];
    const a = keep === null ? low : Math.min(low, keep);
    const b = keep === null ? high : Math.max(high, keep);
    const pad = Math.max((b - a) * 0.12, (least - (b - a)) / 2);
    return [a - pad, b + pad];
  };
