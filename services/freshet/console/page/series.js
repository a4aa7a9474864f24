// From records to the columns that a chart draws: [times, values…], with gaps where nothing was measured.

import { num } from "./read.js";

const DRAWN = 1e12; // what lies beyond is no figure that a chart could show beside others
const drawable = (x) => (num(x) !== null && Math.abs(x) < DRAWN ? x : null);

/**
 * Columns for a chart: x in seconds, and for each `read` a column of numbers or nulls. Where two neighbours lie more than
 * three usual steps apart, a null between them breaks the line: nothing was measured there.
 */
export function columns(items, time, reads) {
  const xs = [];
  const ys = reads.map(() => []);
  const usual = step(items, time);
  items.forEach((item, i) => {
    if (i > 0 && usual > 0 && time(item) - time(items[i - 1]) > 3 * usual) {
      xs.push((time(items[i - 1]) + usual) / 1000);
      ys.forEach((y) => y.push(null));
    }
    xs.push(time(item) / 1000);
    reads.forEach((read, j) => ys[j].push(drawable(read(item))));
  });
  return [xs, ...ys];
}

/** The median distance of neighbours, in ms. */
function step(items, time) {
  const steps = items
    .slice(1)
    .map((item, i) => time(item) - time(items[i]))
    .filter((d) => d > 0);
  steps.sort((a, b) => a - b);
  return steps.length ? steps[steps.length >> 1] : 0;
}

/** Records with the same stop, of several kinds, side by side: [{stop_ms, of: {kind: record}}], oldest first. */
export function beside(kinds) {
  const rows = new Map();
  for (const [kind, items] of Object.entries(kinds)) {
    for (const item of items) {
      const row = rows.get(item.stop_ms) ?? { start_ms: item.start_ms, stop_ms: item.stop_ms, of: {} };
      row.of[kind] = item;
      rows.set(item.stop_ms, row);
    }
  }
  return [...rows.values()].sort((a, b) => a.stop_ms - b.stop_ms);
}

/**
 * Shares of sums over bins of `binMs`: what a rate over longer than one window is. `parts(item)` gives
 * {name: [events, of]}; a bin's share is Σ events / Σ of.
 */
export function shares(items, binMs, parts) {
  const bins = new Map();
  for (const item of items) {
    const at = Math.ceil(item.stop_ms / binMs) * binMs;
    const bin = bins.get(at) ?? bins.set(at, { stop_ms: at, sums: {} }).get(at);
    for (const [name, [events, of]] of Object.entries(parts(item))) {
      if (num(events) === null || num(of) === null) continue;
      const sum = (bin.sums[name] ??= [0, 0]);
      sum[0] += events;
      sum[1] += of;
    }
  }
  return [...bins.values()].sort((a, b) => a.stop_ms - b.stop_ms);
}

export const share = (sum) => (sum && sum[1] > 0 ? sum[0] / sum[1] : null);
