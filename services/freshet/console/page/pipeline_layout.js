// Where the pipeline's nodes, edges and labels stand; arithmetic only.

/** Edges with what they carry, in reading order. */
export const edgesOf = [
  ["client", "gateway", "events"],
  ["gateway", "joiner", "events"],
  ["joiner", "trainer", "samples"],
  ["trainer", "inference", "rows"],
  ["inference", "joiner", "what was served"],
  ["inference", "client", "rankings"],
];

const ORDER = ["client", "gateway", "joiner", "trainer", "inference"];

const right = (x, y) => `M${x} ${y}l-8 -4.5v9z`;
const up = (x, y) => `M${x} ${y}l-4.5 8h9z`;
const down = (x, y) => `M${x} ${y}l-4.5 -8h9z`;
const left = (x, y) => `M${x} ${y}l8 -4.5v9z`;

/** One row; what inference gives back runs below it. `tight`: labels take two lines. */
export function wide(all, tight) {
  const size = { width: Math.min(168, Math.max(118, all * 0.118)), height: 66 };
  const gap = (all - 2 - ORDER.length * size.width) / (ORDER.length - 1);
  const top = 8;
  const middle = top + size.height / 2;
  const foot = top + size.height;
  const nodes = {};
  ORDER.forEach((name, i) => (nodes[name] = { x: 1 + i * (size.width + gap), y: top, ...size }));
  const edges = {};
  for (const [a, b] of [
    ["client", "gateway"],
    ["gateway", "joiner"],
    ["joiner", "trainer"],
    ["trainer", "inference"],
  ]) {
    const from = nodes[a].x + size.width;
    const to = nodes[b].x - 3;
    edges[`${a}>${b}`] = {
      path: `M${from} ${middle}H${to - 6}`,
      tip: right(to, middle),
      label: { x: (from + to) / 2, y: middle, anchor: "middle", below: false },
      twoLines: tight,
    };
  }
  const back = (to, depth, shift) => {
    const x0 = nodes.inference.x + size.width / 2 + shift;
    const x1 = nodes[to].x + size.width / 2;
    const y = foot + depth;
    edges[`inference>${to}`] = {
      path: `M${x0} ${foot}V${y - 10}q0 10 -10 10H${x1 + 10}q-10 0 -10 -10V${foot + 9}`,
      tip: up(x1, foot + 3),
      label: {
        x: to === "client" ? (x1 + nodes.joiner.x) / 2 : (x0 + x1) / 2,
        y,
        anchor: "middle",
        below: false,
      },
      oneLine: true,
    };
  };
  back("joiner", 36, -24);
  back("client", 74, 24);
  return { nodes, edges, height: foot + 82 };
}

/** One column; what inference gives back runs up on the right. */
export function tall(width) {
  const all = Math.min(width, 460);
  const size = { width: Math.min(190, Math.max(136, all * 0.44)), height: 50 };
  const step = size.height + 54;
  const nodes = {};
  ORDER.forEach((name, i) => (nodes[name] = { x: 1, y: 4 + i * step, ...size }));
  const edges = {};
  for (const [a, b] of [
    ["client", "gateway"],
    ["gateway", "joiner"],
    ["joiner", "trainer"],
    ["trainer", "inference"],
  ]) {
    const from = nodes[a].y + size.height;
    const to = nodes[b].y - 3;
    edges[`${a}>${b}`] = {
      path: `M34 ${from}V${to - 6}`,
      tip: down(34, to),
      label: { x: 46, y: from + 5, anchor: "start", below: true },
    };
  }
  const edge = size.width + 3;
  const back = (to, x, from, place) => {
    const y0 = nodes.inference.y + from;
    const y1 = nodes[to].y + size.height / 2;
    edges[`inference>${to}`] = {
      path: `M${edge - 2} ${y0}H${x - 10}q10 0 10 -10V${y1 + 10}q0 -10 -10 -10H${edge + 6}`,
      tip: left(edge, y1),
      label: { x: x - 7, y: place, anchor: "end", below: true },
    };
  };
  const inner = Math.min(all - 62, size.width + 130);
  back("joiner", inner, 17, nodes.trainer.y + 8);
  back("client", Math.min(all - 2, inner + 130), 34, nodes.gateway.y + 8);
  return { nodes, edges, height: nodes.inference.y + size.height + 6 };
}
