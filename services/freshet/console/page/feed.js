// The stream of states and records, and what becomes of it when the server goes away and comes back.

import { num, parsed } from "./read.js";

const SILENCE_MS = 8_000; // states come every second; after so long without one the connection counts as lost
const PAUSES_MS = [500, 1_000, 2_000, 4_000]; // between attempts; the last one for ever

/**
 * Follows /api/events. `on` has: history(answer), state(state), record(record), version(event), status("connecting" | "live" | "lost").
 *
 * Every attempt begins with /api/history, so that neither a gap nor a run folder that was begun anew leaves the charts
 * wrong. What arrives and is not JSON is passed over.
 */
export class Feed {
  constructor(spanS, on) {
    this.spanS = spanS;
    this.on = on;
    this.status = "connecting";
    this.lastState = null; // performance.now() of it
    this.#attempt = 0;
    this.#source = null;
    this.#turn = 0;
  }

  #attempt;
  #source;
  #turn; // of connect(): what an older one still waits for is dropped
  #timer;

  start() {
    setInterval(() => {
      if (this.status === "live" && performance.now() - this.lastState > SILENCE_MS) this.#lost();
    }, 1_000);
    this.#connect();
  }

  /** Show another span: history is asked for anew, the stream goes on from there. */
  setSpan(spanS) {
    this.spanS = spanS;
    this.refresh();
  }

  refresh() {
    clearTimeout(this.#timer);
    this.#connect();
  }

  async #connect() {
    const turn = ++this.#turn;
    this.#source?.close();
    this.#source = null;
    let answer;
    try {
      answer = await getJson(`/api/history?span_s=${this.spanS}`);
    } catch {
      if (turn === this.#turn) this.#lost();
      return;
    }
    if (turn !== this.#turn) return;
    this.on.history(answer);
    const from = num(answer.next);
    const source = new EventSource(from === null ? "/api/events" : `/api/events?from=${from}`);
    this.#source = source;
    source.addEventListener("state", (event) => this.#take(event, (state) => this.#state(state)));
    source.addEventListener("record", (event) => this.#take(event, (r) => this.on.record(r)));
    source.addEventListener("version", (event) => this.#take(event, (v) => this.on.version(v)));
    source.addEventListener("reset", () => {
      if (source === this.#source) this.refresh(); // records were missed, or the log began anew
    });
    source.addEventListener("error", () => {
      if (source === this.#source) this.#lost();
    });
  }

  #take(event, use) {
    const content = parsed(event.data);
    if (event.target === this.#source && content !== null) use(content);
  }

  #state(state) {
    this.#attempt = 0;
    this.lastState = performance.now();
    this.#tell("live");
    this.on.state(state);
  }

  #lost() {
    this.#source?.close();
    this.#source = null;
    this.#turn += 1;
    this.#tell("lost");
    const pause = PAUSES_MS[Math.min(this.#attempt++, PAUSES_MS.length - 1)];
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#connect(), pause);
  }

  #tell(status) {
    if (status === this.status) return;
    this.status = status;
    this.on.status(status);
  }
}

/** An answer as an object. Errors carry what the server said of it. */
export async function getJson(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", ...options });
  const content = parsed(await answer.text());
  if (answer.ok && content !== null) return content;
  throw new Error(content === null ? `${path}: ${answer.status}, and no JSON` : told(content, answer.status));
}

/** A service's error in one sentence: message, expected, found, hint. */
function told(content, status) {
  const error = content.error ?? content;
  const plain = (x) => (typeof x === "string" ? x : JSON.stringify(x));
  const parts = [error.message ?? `answered ${status}`];
  for (const key of ["expected", "found"]) if (error[key] != null) parts.push(`${key} ${plain(error[key])}`);
  if (error.hint) parts.push(error.hint);
  return parts.map(plain).join("; ").slice(0, 1000);
}
