// Panels that are tables: segments, services, tables, wires, dead letters.

import { byId, el, mark, say, svg, Table } from "./dom.js";
import {
  ago,
  bytes,
  clock,
  duration,
  fixed,
  megabytes,
  percent,
  signed,
  times,
  UNKNOWN,
  whole,
} from "./format.js";
import { num, record, records, text } from "./read.js";

const DOTS = 150; // width of a segment's whisker, in px
const MOST_SEGMENTS = 4000; // of all labels together: as many as the server keeps

/** A dot with its whiskers on a common scale, zero in the middle; green is better, red is worse, grey is unclear. */
function whisker({ change, low, high, most }) {
  const x = (v) => DOTS / 2 + (Math.max(-most, Math.min(most, v)) / most) * (DOTS / 2 - 6);
  const level = verdict({ low, high }).level;
  return svg(
    "svg",
    {
      class: `whiskers ${level}`,
      width: DOTS,
      height: 18,
      viewBox: `0 0 ${DOTS} 18`,
      "aria-hidden": "true",
      focusable: "false",
    },
    svg("line", { class: "zero", x1: DOTS / 2, x2: DOTS / 2, y1: 0, y2: 18 }),
    low === null || high === null
      ? null
      : svg("path", { class: "whisker", d: `M${x(low)} 5v8m0 -4H${x(high)}m0 -4v8` }),
    svg("circle", { class: "dot", cx: x(change), cy: 9, r: 4 }),
  );
}

function verdict({ low, high }) {
  if (low === null || high === null || (low <= 0 && high >= 0)) return { level: "unclear", word: "unclear" };
  return high < 0 ? { level: "better", word: "better" } : { level: "worse", word: "worse" };
}

export class Segments {
  constructor(app) {
    this.app = app;
    this.table = new Table(
      byId("segments"),
      "Segments: change in normalised entropy of the newer half of the last hour against the older half",
      [
        { head: "segment", cell: (s) => s.name },
        {
          head: "change in NE",
          class: "dots",
          key: (s) => JSON.stringify([s.change, s.low, s.high, s.most]),
          cell: whisker,
        },
        { head: "", class: "num", cell: (s) => `${signed(s.change)} ${verdict(s).word}` },
        { head: "n", class: "num", cell: (s) => whole(s.n) },
      ],
      'Segments appear here once one of their values has 500 samples in both halves of the last hour. Name them in the spec: [train] segments = ["country"].',
      "cards",
    );
  }

  update(state) {
    const label = this.app.label();
    say(byId("segments-sub"), label ? `change in NE of ${label}, 95 % interval` : "");
    const known = records(state.segments, MOST_SEGMENTS)
      .filter((s) => s.label === label && num(s.change) !== null)
      .map((s) => ({
        name: `${text(s.segment, 40)} = ${text(s.text, 60) || text(s.value, 60) || UNKNOWN}`,
        n: num(s.n),
        change: num(s.change),
        low: num(s.low),
        high: num(s.high),
      }))
      .sort((a, b) => (b.low ?? b.change) - (a.low ?? a.change)) // what is surely worse comes first
      .slice(0, 60);
    const reaches = known
      .map((r) => Math.max(...[r.change, r.low ?? 0, r.high ?? 0].map(Math.abs)))
      .sort((a, b) => a - b);
    const most = Math.max(1e-4, 2 * (reaches[reaches.length >> 1] ?? 0)); // one wide interval may leave the scale
    this.table.fill(known.map((r) => ({ ...r, most })));
  }
}

const LONG_HOST = 28; // letters that a column has room for
const STATES = { ready: "● ready", starting: "◐ starting", down: "✕ down" };

export class Services {
  constructor(app) {
    const past = (s) =>
      app.history.vitals.map((v) => num(record(v.memory_mb)[text(s.name, 40)])).filter((mb) => mb !== null);
    this.table = new Table(
      byId("services"),
      "Services: state, memory, restarts, last exit, where they answer",
      [
        { head: "service", cell: (s) => text(s.name, 40) },
        { head: "state", class: "wide", key: (s) => `${s.state} ${s.reason}`, cell: state },
        { head: "memory", class: "num", cell: (s) => megabytes(num(s.memory_mb)) },
        {
          head: "over time",
          class: "spark",
          key: (s) => JSON.stringify(past(s).slice(-2)) + past(s).length,
          cell: (s) => sparkline(past(s)),
        },
        {
          head: "up for",
          class: "num",
          cell: (s) => (num(s.up_s) === null ? UNKNOWN : duration(s.up_s * 1000)),
        },
        { head: "restarts", class: "num", cell: (s) => whole(num(s.restarts)) },
        { head: "last exit", class: "own", cell: (s) => text(s.last_exit, 80) || "none" },
        { head: "address", class: "where", key: address, cell: shortAddress },
        { head: "pid", class: "num own", cell: (s) => (num(s.pid) === null ? UNKNOWN : String(s.pid)) },
      ],
      "The processes that freshet up keeps running appear here as soon as the console has found them in the run folder; or those that FRESHET_CONSOLE_SERVICES lists.",
      "cards",
    );
  }

  update(state) {
    const services = records(state.services, 500);
    const elsewhere = services.length > 0 && services.every((s) => text(s.host, 253));
    mark(byId("services"), "data-elsewhere", elsewhere ? "yes" : null); // of these no process is known
    this.table.fill(services);
    const roles = records(state.roles, 50);
    const several = roles.some((r) => num(r.of) > 1);
    const each = (r) => `${text(r.role, 40)} ${r.ready === r.of ? "" : `${num(r.ready)} of `}${num(r.of)}`;
    say(byId("services-sub"), several ? `ready: ${roles.map(each).join(", ")}` : "");
  }
}

/** Values in the order of time, from zero up: what is flat looks flat. */
function sparkline(values) {
  const [width, height] = [96, 18];
  const most = Math.max(1e-9, ...values) * 1.15;
  const step = Math.max(1, Math.floor(values.length / width)); // one point a pixel
  const points = values.filter((_, i) => i % step === 0);
  const at = (v, i) =>
    `${((i / Math.max(1, points.length - 1)) * width).toFixed(1)} ${(height - Math.min(1, Math.max(0, v / most)) * height).toFixed(1)}`;
  const root = svg("svg", {
    class: "sparkline",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "aria-hidden": "true",
    focusable: "false",
  });
  if (points.length > 1) root.append(svg("path", { d: `M${points.map(at).join("L")}` }));
  return root;
}

/** host:port; of a process on this machine its port. */
function address(service) {
  const [host, port] = [text(service.host, 253), num(service.port)];
  if (port === null) return UNKNOWN;
  return host.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
}

/** The address; of a long host name the first part, and the whole where one points at it. */
function shortAddress(service) {
  const whole = address(service);
  const host = text(service.host, 253);
  const dot = host.indexOf(".");
  const short = host.length > LONG_HOST && dot > 0 ? `${host.slice(0, dot)}…:${service.port}` : whole;
  return el("span", short === whole ? {} : { title: whole }, short);
}

function state(service) {
  const known = text(service.state, 20);
  const reason = text(service.reason, 200);
  const node = badge(
    STATES[known] ?? "unknown",
    { ready: "ok", starting: "idle", down: "bad" }[known] ?? "unknown",
  );
  return reason ? [node, el("span", { class: "quiet-text" }, ` ${reason}`)] : node;
}

export class Tables {
  constructor() {
    this.table = new Table(
      byId("tables"),
      "Embedding tables: rows, memory, evicted",
      [
        { head: "table", cell: (t) => text(t.table, 60) },
        { head: "rows", class: "num", cell: (t) => whole(num(t.rows)) },
        { head: "memory", class: "num", cell: (t) => bytes(num(t.bytes)) },
        { head: "evicted", class: "num", cell: (t) => whole(num(t.evicted)) },
      ],
      "Embedding tables appear here with their rows once the trainer has learned from its first samples.",
    );
  }

  update(state) {
    this.table.fill(records(state.tables, 100));
    const all = num(state.rows_bytes);
    say(byId("tables-sub"), all === null ? "" : `${bytes(all)} in all, with indexes and room to grow`);
  }
}

const nanoseconds = (seconds, rows) => (seconds === null || !(rows > 0) ? null : Math.round((seconds / rows) * 1e9));

export class Wires {
  constructor() {
    this.table = new Table(
      byId("wires"),
      "Wires: rows that travelled, their codec, bytes and error",
      [
        { head: "wire", cell: (w) => text(w.wire, 40) },
        { head: "tables", class: "wide", cell: (w) => text(w.tables, 120) },
        { head: "codec", cell: (w) => text(w.codec, 20) },
        { head: "rows", class: "num", cell: (w) => whole(num(w.rows)) },
        { head: "sent", class: "num", cell: (w) => bytes(num(w.bytes_wire)) },
        { head: "in fp32", class: "num", cell: (w) => bytes(num(w.bytes_raw)) },
        { head: "shorter", class: "num", cell: (w) => `${times(num(w.bytes_raw), num(w.bytes_wire))}×` },
        { head: "error", class: "num", cell: (w) => percent(num(w.error)) },
        { head: "coding, ns each", class: "num", cell: (w) => whole(nanoseconds(num(w.codec_s), num(w.rows))) },
      ],
      "Wires appear here once rows were sent to serving, or travel between processes.",
      "cards",
    );
    this.links = new Table(
      byId("links"),
      "Links between processes that carry rows: their codec, and why",
      [
        { head: "service", cell: (l) => text(l.service, 40) },
        { head: "link to", cell: (l) => text(l.address, 80) },
        { head: "carries", cell: (l) => text(l.carries, 20) },
        { head: "codec", cell: (l) => text(l.codec, 20) || UNKNOWN },
        { head: "why", class: "wide", cell: (l) => text(l.why, 200) || UNKNOWN },
      ],
      "No process looks rows up in another one.",
      "cards",
    );
  }

  update(state) {
    this.table.fill(records(state.wires, 100));
    this.links.fill(records(state.links, 100));
  }
}

export class Letters {
  constructor(app) {
    this.table = new Table(
      byId("letters"),
      "Dead letters: the newest events that were refused or could not be joined, with the reason",
      [
        {
          head: "when",
          class: "when",
          cell: (l) =>
            num(l.time_ms) === null
              ? UNKNOWN
              : `${ago(num(l.time_ms), app.now())} (${clock(num(l.time_ms))})`,
        },
        { head: "from", cell: (l) => text(l.from, 40) },
        { head: "topic", cell: (l) => text(l.topic, 80) },
        { head: "reason", class: "wide", cell: (l) => text(l.reason, 300) },
        { head: "event", class: "wide code", cell: (l) => text(l.text, 300) },
      ],
      "Nothing has been refused. An event that does not fit its schema, or that the joiner cannot place, appears here with the reason; nothing is dropped in silence.",
      "cards",
    );
  }

  update(state) {
    say(byId("losses"), lossesOf(records(state.losses, 20)));
    const letters = record(state.dead_letters);
    this.table.fill(records(letters.newest, 20));
    const parts = [
      ["refused", "refused by the gateway"],
      ["joiner", "set aside by the joiner"],
    ];
    say(
      byId("letters-sub"),
      parts
        .filter(([k]) => num(letters[k]) !== null)
        .map(([k, words]) => `${whole(letters[k])} ${words}`)
        .join(", "),
    );
  }
}

/** What of the events of the last five minutes taught nothing, in a sentence. */
function lossesOf(losses) {
  const known = losses.filter((l) => num(l.of));
  const lost = known.filter((l) => num(l.lost));
  if (!known.length) return "";
  if (!lost.length) return "Losses of the last 5 minutes: none";
  const one = (l) =>
    `${text(l.figure, 40).replaceAll("_", " ")} ${whole(l.lost)} of ${whole(l.of)} (${((100 * num(l.lost)) / num(l.of)).toFixed(1)} %)`;
  return `Losses of the last 5 minutes: ${lost.map(one).join("; ")}`;
}

/** Text in a level's colour; the text says the same. */
function badge(words, level) {
  const node = document.createElement("span");
  node.className = `level ${level}`;
  node.textContent = words;
  return node;
}

export { badge };
