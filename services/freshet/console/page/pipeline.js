// The pipeline as a drawing: nodes with their state, edges with rate and lag. One layout for wide, one for narrow.

import { byId, el, onWidth, say, svg } from "./dom.js";
import { count, megabytes, plural, rate, whole } from "./format.js";
import { num, record, records, text } from "./read.js";
import { edgesOf, tall, wide } from "./pipeline_layout.js";

export const NODES = ["client", "gateway", "joiner", "trainer", "inference"];
const WIDE = 1080; // from this width on the nodes stand in one row with room for labels
const ROW = 820; // from this width on in one row, with labels on two lines
const STATES = { ready: "● ready", degraded: "▲", starting: "◐ starting", down: "✕ down" };
const NODE_LEVELS = { ready: "ok", degraded: "warn", starting: "idle", down: "bad" };
const LEVELS = { ok: "", warn: "▲", bad: "✕", idle: "", unknown: "" };
const WORDS = { ok: "", warn: "▲ behind", bad: "✕ far behind", idle: "idle", unknown: "lag unknown" };
const EMPTY =
  "The pipeline appears here as soon as the console has looked at the services: a second after it started.";

export class Pipeline {
  constructor() {
    this.host = el("div", { class: "drawing pipeline" });
    this.caption = el("figcaption", {}, EMPTY);
    this.rows = el("tbody");
    const heads = ["from", "to", "what", "rate", "lag", "level"].map((h) => el("th", { scope: "col" }, h));
    const table = el(
      "table",
      { class: "sr" },
      el("caption", {}, "Edges of the pipeline"),
      el("thead", {}, el("tr", {}, ...heads)),
      this.rows,
    );
    const legend = el(
      "div",
      { class: "legend", "aria-hidden": "true" },
      ...[
        ["ok", "keeping up"],
        ["warn", "▲ behind"],
        ["bad", "✕ far behind"],
        ["idle", "idle"],
      ].map(([level, name]) => el("span", { class: "key" }, el("i", { class: `edge-key ${level}` }), name)),
    );
    byId("pipeline").append(
      el("figure", {}, legend, this.host, this.caption, el("div", { class: "sr" }, table)),
    );
    onWidth(this.host, (width) => this.#draw((this.width = width)));
  }

  update(state) {
    this.nodes = nodes(state);
    this.edges = edges(state);
    this.#draw(this.width);
    say(this.caption, words(this.nodes, this.edges));
    const lines = this.edges.map((e) => [
      e.from,
      e.to,
      e.what,
      e.rate,
      [e.lag || "none known", e.note].filter(Boolean).join(", "),
      e.level,
    ]);
    const key = JSON.stringify(lines);
    if (key === this.lines) return;
    this.lines = key;
    this.rows.replaceChildren(...lines.map((cells) => el("tr", {}, ...cells.map((c) => el("td", {}, c)))));
  }

  #draw(width) {
    if (!width || !this.nodes) return;
    const key = JSON.stringify([width, this.nodes, this.edges]);
    if (key === this.key) return;
    this.key = key;
    const layout = width >= ROW ? wide(width, width < WIDE) : tall(width);
    const root = svg("svg", {
      width,
      height: layout.height,
      viewBox: `0 0 ${width} ${layout.height}`,
      "aria-hidden": "true",
      focusable: "false",
    });
    for (const edge of this.edges) drawEdge(root, layout.edges[`${edge.from}>${edge.to}`], edge);
    for (const node of this.nodes) drawNode(root, layout.nodes[node.name], node);
    this.host.replaceChildren(root);
  }
}

function nodes(state) {
  const roles = Object.fromEntries(records(state.roles, 50).map((r) => [text(r.role, 40), r]));
  return NODES.map((name) => {
    if (name === "client") {
      const rateOf = num(record(state.simulator).rate);
      return {
        name,
        level: "none",
        first: state.simulator ? "simulator" : "clients",
        second: rateOf === null ? "your application" : `set to ${count(rateOf)}/s`,
      };
    }
    const role = record(roles[name]);
    const all = num(role.ready) === num(role.of);
    const memory = all ? num(role.memory_mb) : null; // of a part it says little, and a node is narrow
    const second = [standing(role), memory === null ? "" : megabytes(memory)].filter(Boolean).join(" · ");
    return {
      name,
      level: NODE_LEVELS[text(role.state, 20)] ?? "unknown",
      first: (num(role.of) ?? 1) > 1 ? `${name} × ${role.of}` : name,
      second,
      away: `${num(role.of) - num(role.ready)} of ${role.of}`,
    };
  });
}

/** "● ready"; of several of which some are not, how many are. */
function standing(role) {
  const known = text(role.state, 20);
  const word = STATES[known] ?? "unknown";
  const [ready, of] = [num(role.ready), num(role.of)];
  if (known === "degraded") return `${word} ${ready} of ${of} ready`;
  return known === "starting" && ready > 0 ? `◐ ${ready} of ${of} ready` : word;
}

function edges(state) {
  const found = Object.fromEntries(
    records(state.edges, 50).map((e) => [`${text(e.from, 40)}>${text(e.to, 40)}`, e]),
  );
  return edgesOf.map(([from, to, what]) => {
    const e = record(found[`${from}>${to}`]);
    const level = Object.hasOwn(LEVELS, text(e.level, 20)) ? e.level : "unknown";
    const lag = num(e.lag);
    return {
      from,
      to,
      what: text(e.what, 60) || what,
      level,
      hasLag: level !== "unknown" || text(e.lag_unit, 20) !== "",
      note: text(e.note, 120),
      rate:
        num(e.rate) === null
          ? `${text(e.unit, 20) || "rate"} unknown`
          : rate(num(e.rate), text(e.unit, 20) || "/s"),
      lag:
        lag === null
          ? ""
          : `lag ${lag < 10_000 ? whole(lag) : count(lag)} ${lag === 1 ? text(e.lag_unit, 20).replace(/s$/, "") : text(e.lag_unit, 20)}`.trim(),
    };
  });
}

function drawEdge(root, at, edge) {
  if (!at) return;
  const lag =
    edge.lag && edge.level !== "idle"
      ? `${LEVELS[edge.level]} ${edge.lag}`.trim()
      : edge.hasLag
        ? WORDS[edge.level]
        : "";
  const labels = at.oneLine ? [[edge.rate, lag].filter(Boolean).join(" · ")] : [edge.rate, lag];
  root.append(
    svg("path", { class: `edge ${edge.level}`, d: at.path }),
    svg("path", { class: `tip ${edge.level}`, d: at.tip }),
  );
  const { x, y, anchor, below } = at.label;
  const put = (words, line, look) =>
    root.append(svg("text", { class: look, x, y: y + line, "text-anchor": anchor }, words));
  labels.filter(Boolean).forEach((label, i) => {
    const look = i ? `lag ${edge.level}` : "rate";
    const lines = at.twoLines ? halves(label) : [label];
    const first = below ? 15 * i + 14 : i ? 18 : 8 - 15 * lines.length;
    lines.forEach((line, j) => put(line, first + 15 * j, look));
  });
}

/** "1,012 events/s" as two lines: the unit stands below. */
function halves(label) {
  const at = label.lastIndexOf(" ");
  return at < 0 ? [label] : [label.slice(0, at), label.slice(at + 1)];
}

function drawNode(root, at, node) {
  const { x, y, width, height } = at;
  root.append(
    svg("rect", { class: `node ${node.level}`, x, y, width, height, rx: 8 }),
    svg(
      "text",
      { class: "node-name", x: x + width / 2, y: y + height / 2 - 4, "text-anchor": "middle" },
      node.first,
    ),
    svg(
      "text",
      {
        class: `node-state ${node.level}`,
        x: x + width / 2,
        y: y + height / 2 + 14,
        "text-anchor": "middle",
      },
      node.second,
    ),
  );
}

function words(all, edges) {
  const down = all.filter((n) => n.level === "bad").map((n) => n.name);
  const starting = all.filter((n) => n.level === "idle").map((n) => n.name);
  const behind = edges.filter((e) => e.level === "warn" || e.level === "bad");
  const into = edges.find((e) => e.from === "client");
  const said = [];
  if (down.length) said.push(`${down.join(", ")} ${down.length > 1 ? "are" : "is"} down`);
  for (const n of all.filter((each) => each.level === "warn")) said.push(`${n.away} ${n.name} not ready`);
  if (starting.length) said.push(`${starting.join(", ")} starting`);
  said.push(`${into.rate} come in`);
  said.push(
    behind.length
      ? `${plural(behind.length, "edge")} behind: ${behind.map((e) => `${e.from} to ${e.to}, ${[e.lag || "lag unknown", e.note].filter(Boolean).join(", ")}`).join("; ")}`
      : "nothing is behind",
  );
  return `${said.join("; ")}.`.replace(/^./, (c) => c.toUpperCase());
}
