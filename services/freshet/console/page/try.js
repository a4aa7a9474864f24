// Try it: a request that was really made, edited and ranked; and the same for a terminal and for Python.

import { byId, el, say, show, Table } from "./dom.js";
import { parse, pretty, python, quoted } from "./exact.js";
import { getJson } from "./feed.js";
import { count, duration, fixed, plural, whole } from "./format.js";
import { list, num, record, records, text } from "./read.js";
import { authorization } from "./token.js";

const EMPTY =
  "Requests that were served lately appear in the list once there are some. Until then, write your own: a context and its candidates, with the fields of your schema.";
const BLANK = { context: {}, candidates: [{}, {}] };

export class Try {
  constructor(app) {
    this.app = app;
    this.requests = [];
    this.pick = el("select", { id: "try-pick" });
    this.again = el("button", { type: "button" }, "Newer requests");
    this.edit = el("textarea", {
      id: "try-json",
      rows: "14",
      spellcheck: "false",
      autocomplete: "off",
      "aria-describedby": "try-hint",
    });
    this.k = el("input", {
      id: "try-k",
      type: "number",
      min: "1",
      max: "1000",
      value: "10",
      inputmode: "numeric",
    });
    this.rank = el("button", { type: "button", class: "main" }, "Rank");
    this.hint = el("p", { id: "try-hint", class: "quiet-text" }, EMPTY);
    this.wrong = el("p", { class: "wrong", role: "alert" });
    this.said = el("p", { class: "said", role: "status" });
    this.result = el("div");
    this.curl = snippet("curl", "The same with curl");
    this.code = snippet("Python", "The same in Python");
    const asked = el(
      "div",
      { class: "asked" },
      el(
        "div",
        { class: "row" },
        el("label", { for: "try-pick" }, "A recent request"),
        this.pick,
        this.again,
      ),
      el("label", { for: "try-json" }, "Context and candidates, as JSON"),
      this.edit,
      this.hint,
      el("div", { class: "row" }, el("label", { for: "try-k" }, "Items wanted (k)"), this.k, this.rank),
      this.wrong,
    );
    byId("try").append(
      el("div", { class: "pair uneven" }, asked, el("div", { class: "answer" }, this.said, this.result)),
      el("div", { class: "pair" }, this.curl.node, this.code.node),
    );
    this.table = new Table(
      this.result,
      "Ranked candidates, best first",
      [
        { head: "place", class: "num", cell: (i) => String(i.place) },
        { head: "candidate", class: "wide", cell: (i) => i.candidate },
        { head: "score", class: "num", cell: (i) => fixed(num(i.score), 4) },
        {
          head: "predictions",
          key: (i) => JSON.stringify(i.predictions),
          cell: (i) => i.predictions.map((p) => el("span", { class: "rowfact whole" }, p)),
        },
        { head: "rows", key: (i) => JSON.stringify(i.rows), cell: (i) => rowsOf(i.rows) },
      ],
      "Ranked items appear here with their scores, the predictions of each label, the ages of the rows that were used, and what had no row yet.",
      "cards",
    );
    this.edit.value = pretty(BLANK);
    this.door = { url: "http://127.0.0.1:7001", secure: false, token: false, certificate: false };
    this.pick.addEventListener("change", () => this.#chosen());
    this.again.addEventListener("click", () => this.#load());
    this.rank.addEventListener("click", () => this.#rank());
    for (const node of [this.edit, this.k]) node.addEventListener("input", () => this.#snippets());
    this.#snippets();
    this.untouched = true; // nothing was picked or written yet: the first requests that come are shown
    this.edit.addEventListener("input", () => (this.untouched = false));
  }

  /** With each state: look for requests until there are some; the inference server may have moved. */
  update(state) {
    const port = num(record(records(state.services, 50).find((s) => s.name === "inference")).port) ?? 7001;
    const { scheme, token, certificate } = record(state.asking);
    const door = {
      url: `${scheme === "https" ? "https" : "http"}://127.0.0.1:${port}`,
      secure: scheme === "https",
      token: token === true,
      certificate: certificate === true,
    };
    if (JSON.stringify(door) !== JSON.stringify(this.door)) {
      this.door = door;
      this.#snippets();
    }
    const due =
      this.requests.length === 0 && (this.looked === undefined || performance.now() - this.looked > 5_000);
    if (due) this.#load();
  }

  async #load() {
    this.looked = performance.now();
    let found;
    try {
      const answer = await fetch("/api/requests", { cache: "no-store" });
      found = parse(await answer.text());
    } catch {
      return; // the connection's own state is shown above
    }
    this.requests = records(Array.isArray(found) ? found : record(found).requests, 50);
    show(this.hint, this.requests.length === 0);
    this.pick.replaceChildren(
      ...(this.requests.length ? [] : [el("option", { value: "" }, "none yet")]),
      ...this.requests.map((r, i) => el("option", { value: String(i) }, titleOf(r))),
    );
    if (this.untouched && this.requests.length) this.#chosen();
  }

  #chosen() {
    const request = this.requests[Number(this.pick.value || 0)];
    if (!request) return;
    this.untouched = false;
    this.edit.value = pretty({ context: record(request.context), candidates: list(request.candidates) });
    this.#snippets();
  }

  /** {context, candidates} as written; throws an Error that says what is wrong with it. */
  #asked() {
    const content = parse(this.edit.value);
    if (!content || typeof content !== "object" || !Array.isArray(content.candidates)) {
      throw new Error('expected {"context": {…}, "candidates": [{…}, …]}');
    }
    return { context: content.context ?? {}, candidates: content.candidates };
  }

  #snippets() {
    let asked;
    try {
      asked = this.#asked();
      this.edit.removeAttribute("aria-invalid");
    } catch (error) {
      this.edit.setAttribute("aria-invalid", "true");
      say(this.wrong, `This is not a request yet: ${error.message}`);
      return;
    }
    say(this.wrong, "");
    const k = Math.max(1, Math.floor(Number(this.k.value) || 10));
    const body = JSON.stringify({ ...asked, k, dry_run: true, explain: true });
    this.curl.set(curl(this.door, body));
    const lines = [
      ...(this.door.token ? ["from pathlib import Path", ""] : []),
      "from freshet.client import Client",
      "",
      ...client(this.door),
      "    ranking = client.rank(",
      `        ${python(asked.context, "        ")},`,
      `        ${python(asked.candidates, "        ")},`,
      `        k=${k}, dry_run=True, explain=True,`,
      "    )",
      "for item in ranking.items:",
      "    print(item.index, item.score, item.predictions, item.rows)",
    ];
    this.code.set(lines.join("\n"));
  }

  async #rank() {
    say(this.wrong, "");
    this.rank.disabled = true;
    try {
      const asked = this.#asked();
      const k = Math.max(1, Math.floor(Number(this.k.value) || 10));
      const began = performance.now();
      const answer = await getJson("/api/try", {
        method: "POST",
        headers: { "content-type": "application/json", ...authorization() },
        body: JSON.stringify({ ...asked, k }),
      });
      this.#show(answer, asked.candidates, performance.now() - began);
    } catch (error) {
      say(this.wrong, `Not ranked: ${error.message}`);
    } finally {
      this.rank.disabled = false;
    }
  }

  #show(answer, candidates, tookMs) {
    const items = records(answer.items, 1000).map((item, i) => ({
      place: i + 1,
      candidate: told(candidates[item.index]),
      score: num(item.score),
      predictions: Object.entries(record(item.predictions))
        .slice(0, 8)
        .map(([label, p]) => `${text(label, 30)} ${fixed(num(p), 4)}`),
      rows: record(item.rows),
    }));
    this.table.fill(items);
    const unknown = Object.entries(record(answer.unknown_rows)).filter(([, n]) => num(n) > 0);
    const defaulted = Object.entries(record(answer.defaulted_rows)).filter(([, n]) => num(n) > 0);
    const parts = [
      `${plural(items.length, "item")} ranked by version ${num(answer.version) ?? "–"} in ${duration(tookMs)}`,
      `learned from events ${duration(num(answer.freshness_ms))} old`,
      unknown.length
        ? `without a row yet: ${unknown.map(([f, n]) => `${text(f, 40)} ${count(num(n))}`).join(", ")}`
        : "every value has a row",
      ...(defaulted.length
        ? [`of these, on disk and not read: ${defaulted.map(([why, n]) => `${text(why, 40)} ${count(num(n))}`).join(", ")}`]
        : []),
    ];
    say(this.said, `${parts.join("; ")}.`);
  }
}

/** For a terminal. The token's header comes from a file: arguments of commands are seen by all users of a machine. */
function curl({ url, secure, token, certificate }, body) {
  const options = [
    ...(secure ? ["--cacert ca.pem"] : []),
    ...(certificate ? ["--cert client.pem --key client.key"] : []),
    ...(token ? ["-H @rank.header"] : []),
    "-H 'content-type: application/json'",
    `-d ${quoted(body)}`,
  ];
  const note = token ? "# rank.header holds one line, Authorization: Bearer, and a token with the scope rank\n" : "";
  return `${note}${[`curl -s ${url}/v1/rank`, ...options].join(" \\\n  ")}`;
}

/** The first lines of Python: a client, with what this door wants to be shown. */
function client({ url, secure, token, certificate }) {
  const options = [
    ...(token ? ['token=Path("rank.token").read_text().strip()'] : []),
    ...(secure ? ['ca_file="ca.pem"'] : []),
    ...(certificate ? ['cert_file="client.pem"', 'key_file="client.key"'] : []),
  ];
  if (!options.length) return [`with Client(inference="${url}") as client:`];
  return [
    "with Client(",
    ...[`inference="${url}"`, ...options].map((option) => `    ${option},`),
    ") as client:",
  ];
}

/** How many rows of an item are known, how long ago they were touched, which are missing; each of them on demand. */
function rowsOf(rows) {
  const found = Object.entries(rows)
    .slice(0, 100)
    .map(([feature, r]) => {
      const { known, of, age_s: age } = record(r);
      return { feature: text(feature, 60), known: num(known) ?? 0, of: num(of) ?? 0, age: num(age) };
    });
  const missing = found.filter((r) => r.known < r.of);
  const ages = found.map((r) => r.age).filter((a) => a !== null);
  const sum = (key) => found.reduce((total, r) => total + r[key], 0);
  const old = ages.length ? `, touched ${span(Math.min(...ages), Math.max(...ages))} ago` : "";
  const summary = el("summary", {}, `${whole(sum("known"))} of ${whole(sum("of"))} known${old}`);
  if (missing.length)
    summary.append(
      el("span", { class: "rowfact missing" }, `no row: ${missing.map((r) => r.feature).join(", ")}`),
    );
  const facts = found.map((r) => {
    const age = r.age === null ? "" : `, ${duration(r.age * 1000)} ago`;
    const what = r.known < r.of ? `${whole(r.known)} of ${whole(r.of)} known` : "known";
    return el(
      "span",
      { class: r.known < r.of ? "rowfact missing" : "rowfact" },
      `${r.feature}: ${what}${age}`,
    );
  });
  return el("details", {}, summary, ...facts);
}

const span = (from, to) =>
  duration(from * 1000) === duration(to * 1000)
    ? duration(to * 1000)
    : `${duration(from * 1000)} to ${duration(to * 1000)}`;

/** A candidate's fields in one line. */
function told(candidate) {
  const plain = (v) => (typeof v === "string" ? v : (JSON.stringify(v) ?? ""));
  return text(
    Object.entries(record(candidate))
      .map(([k, v]) => `${k} ${plain(v)}`)
      .join(", "),
    200,
  );
}

/** What tells a request from others: its id, and the first fields of its context. */
function titleOf(request) {
  const fields = Object.entries(record(request.context)).filter(
    ([, v]) => v === null || typeof v !== "object" || JSON.isRawJSON?.(v),
  );
  const id = text(request.request_id, 40);
  const facts = fields
    .filter(([, v]) => text(v, 40) !== id)
    .slice(0, 4)
    .map(([k, v]) => `${k} ${JSON.stringify(v)}`)
    .join(", ");
  return text(`${id}: ${facts}`, 90);
}

/** Code to copy. */
function snippet(name, title) {
  const code = el("code");
  const said = el("span", { class: "quiet-text", role: "status" });
  const button = el("button", { type: "button", "aria-label": `Copy ${name}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      say(said, "copied");
    } catch {
      getSelection().selectAllChildren(code);
      say(said, "selected: press Ctrl-C");
    }
    setTimeout(() => say(said, ""), 3_000);
  });
  const scroll = el("pre", { tabindex: "0", role: "region", "aria-label": title }, code);
  return {
    node: el(
      "div",
      { class: "snippet" },
      el("div", { class: "head" }, el("h3", {}, title), said, button),
      scroll,
    ),
    set: (s) => say(code, s),
  };
}
