// What the charts show: a bounded piece of the measures topic, newest last.

import { num, record, records, text } from "./read.js";

export const MOST = 1500; // entries a series; the server thins to 720, so a new piece is asked for long before
const MOST_WINDOWS = 4 * 32; // series of windows: 4 kinds of prediction, 32 labels as a spec allows
const MARKS = 200; // drifts and versions that are kept
const AHEAD_MS = 3_600_000; // a record that is dated further ahead than any clock would be is passed over

/** Records of the last `spanMs` milliseconds. Memory is bounded whatever arrives: by time, and by MOST. */
export class History {
  constructor(spanMs) {
    this.spanMs = spanMs;
    this.clear();
  }

  clear() {
    this.next = null; // offset to go on from
    this.vitals = [];
    this.clicks = [];
    this.drifts = [];
    this.versions = []; // [{time_ms, number, what, reason}]
    this.windows = new Map(); // "of label" -> window records
    this.latest = Infinity; // newest time that is believed
    this.full = false; // thinning is due: ask the server for the span anew
  }

  /** Begin anew with an answer of /api/history. */
  load(answer, now) {
    this.clear();
    this.latest = now + AHEAD_MS;
    this.next = num(answer.next);
    for (const kind of ["vitals", "clicks", "drifts"]) {
      for (const r of records(answer[kind], 20_000)) this.#add(kind, r);
    }
    for (const r of records(answer.windows, 100_000)) this.#window(r);
    for (const r of records(answer.versions)) this.#version(num(r.time_ms), r);
    this.full = false;
    this.trim(now);
  }

  /** Add one record of the measures topic. */
  add(r, now) {
    this.latest = now + AHEAD_MS;
    if (r.kind === "vitals") this.#add("vitals", r);
    else if (r.kind === "clicks") this.#add("clicks", r);
    else if (r.kind === "drift") this.#add("drifts", r);
    else if (r.kind === "window") this.#window(r);
    this.trim(now);
  }

  /** Add what became of a version. */
  addVersion(v, now) {
    this.latest = now + AHEAD_MS;
    this.#version(num(v.time_ms), v);
    this.trim(now);
  }

  /** Windows of one kind and label, oldest first. */
  of(of, label) {
    return this.windows.get(`${of} ${label}`) ?? [];
  }

  /** Time of the oldest record that is drawn; Infinity if there is none. */
  oldest() {
    const first = [
      this.vitals[0]?.time_ms,
      this.clicks[0]?.start_ms,
      ...[...this.windows.values()].map((w) => w[0].start_ms),
    ];
    return Math.min(...first.map((t) => num(t) ?? Infinity));
  }

  trim(now) {
    const since = now - this.spanMs;
    const cut = (items, time, most = MOST) => {
      let from = Math.max(0, items.length - most);
      while (from < items.length && time(items[from]) < since) from += 1;
      if (from > 0) items.splice(0, from);
    };
    cut(this.vitals, (r) => r.time_ms);
    cut(this.clicks, (r) => r.stop_ms);
    cut(this.drifts, (r) => r.time_ms, MARKS);
    cut(this.versions, (r) => r.time_ms, MARKS);
    for (const [key, windows] of this.windows) {
      cut(windows, (r) => r.stop_ms);
      if (windows.length === 0) this.windows.delete(key);
    }
  }

  #add(kind, r) {
    const time = kind === "clicks" ? num(r.stop_ms) : num(r.time_ms);
    if (time === null || time > this.latest || (kind === "clicks" && num(r.start_ms) === null)) return;
    this.#insert(this[kind], r, (x) => (kind === "clicks" ? x.stop_ms : x.time_ms));
  }

  #window(r) {
    if (r.segment !== null && r.segment !== undefined) return;
    if (num(r.start_ms) === null || num(r.stop_ms) === null || r.stop_ms > this.latest) return;
    const key = `${text(r.of, 40)} ${text(r.label, 100)}`;
    if (!this.windows.has(key) && this.windows.size >= MOST_WINDOWS) return;
    const windows = this.windows.get(key) ?? this.windows.set(key, []).get(key);
    const { start_ms, stop_ms, of, label, measures } = r; // the reliability of old windows is not drawn: not kept
    this.#insert(windows, { start_ms, stop_ms, of, label, measures: record(measures) }, (x) => x.stop_ms);
  }

  #version(time, v) {
    // What came twice has the same time; a version that is promoted again by hand has not.
    const same = (x) => x.number === v.number && x.what === v.what && x.time_ms === time;
    if (time === null || time > this.latest || this.versions.some(same)) return;
    const entry = { time_ms: time, number: num(v.number), what: text(v.what, 40), reason: text(v.reason) };
    this.#insert(this.versions, entry, (x) => x.time_ms);
  }

  /** Keep order of time; a record that came twice replaces itself. */
  #insert(items, r, time) {
    const at = time(r);
    let i = items.length;
    while (i > 0 && time(items[i - 1]) > at) i -= 1;
    const twice =
      i > 0 && time(items[i - 1]) === at && (items === this.vitals || items === this.clicks || r.measures);
    items.splice(twice ? i - 1 : i, twice ? 1 : 0, r);
    if (items.length > MOST) this.full = true;
  }
}
