// Versions of the dense weights: which one serves, why one was held, and moving it by hand.

import { badge } from "./lists.js";
import { byId, el, say, show, Table } from "./dom.js";
import { ago, fixed, whole } from "./format.js";
import { list, num, record, records, text } from "./read.js";
import { confirmed } from "./token.js";

const LEVELS = { promoted: "ok", stable: "ok", held: "bad" };

export class Versions {
  constructor(app) {
    this.app = app;
    const measure = (name, places) => (v) => fixed(num(measuresOf(v, app.label())[name]), places);
    this.table = new Table(
      byId("versions"),
      "Versions, newest first",
      [
        { head: "version", cell: (v) => (num(v.number) === null ? "–" : `v${v.number}`) },
        {
          head: "serves as",
          class: "chips",
          key: (v) => JSON.stringify([v.aliases, v.serving]),
          cell: chips,
        },
        { head: "made", class: "num", cell: (v) => ago(num(v.created_ms), app.now()) },
        {
          head: "verdict",
          key: (v) => text(v.verdict, 40),
          cell: (v) => badge(text(v.verdict, 40) || "not judged", LEVELS[v.verdict] ?? "idle"),
        },
        { head: "AUC", class: "num", cell: measure("auc", 3) },
        { head: "NE", class: "num", cell: measure("ne", 3) },
        { head: "calibration", class: "num", cell: measure("calibration", 2) },
        { head: "step", class: "num", cell: (v) => whole(num(v.step)) },
        { head: "why", class: "wide", key: (v) => `${v.verdict} ${text(v.reason, 300)}`, cell: why },
        {
          head: "",
          key: (v) => `${v.number} ${v.serving} ${v.pinned}`,
          cell: (v) => this.#button(v),
        },
      ],
      "Versions appear here every few seconds once the trainer has learned from its first samples; a gate then promotes each one or says why it holds it.",
      "cards",
      (v) => text(v.number),
    );
    byId("rollback").addEventListener("click", () => this.#rollback());
  }

  update(state) {
    const versions = record(state.versions);
    const serving = num(versions.serving);
    const stable = num(record(versions.aliases).stable);
    const rows = records(versions.list, 50).map((v) => ({
      ...v,
      serving: serving !== null && v.number === serving,
      pinned: versions.pinned === true && stable !== null && v.number === stable,
    }));
    this.table.fill(rows);
    show(byId("rollback"), rows.length > 1);
    const held = rows.filter((v) => v.verdict === "held").length;
    const parts = [
      serving === null ? "" : `v${serving} serves`,
      versions.pinned === true ? "pinned by hand: the gate promotes nothing" : "",
      held ? `${held} held of ${rows.length}` : "",
      rows.length ? "measured since the beginning" : "",
    ];
    say(byId("versions-sub"), parts.filter(Boolean).join(" · "));
  }

  #button(v) {
    if ((v.serving && !v.pinned) || num(v.number) === null)
      return el("span", { class: "quiet-text" }, v.serving ? "serving" : "");
    const verb = v.pinned ? "Unpin" : "Promote";
    const button = el("button", { type: "button", "aria-label": `${verb} version ${v.number}` }, `${verb}…`);
    const move = v.pinned ? this.#unpin : this.#promote;
    button.addEventListener("click", () => move.call(this, num(v.number)));
    return button;
  }

  #promote(number) {
    this.#move({
      title: `Serve version ${number}?`,
      what: "It becomes stable and is served within seconds, whatever the gate said of it, unless its weights are not finite. The gate goes on with the versions after it.",
      yes: `Promote v${number}`,
      path: "/api/promote",
      body: { number },
      done: `Version ${number} was promoted.`,
    });
  }

  #unpin(number) {
    this.#move({
      title: `Unpin version ${number}?`,
      what: "It goes on serving until the gate promotes a newer version, each compared with it. Versions written under the pin were not judged.",
      yes: `Unpin v${number}`,
      path: "/api/promote",
      body: { number },
      done: `Version ${number} is pinned no more.`,
    });
  }

  #rollback() {
    this.#move({
      title: "Roll back?",
      what: "The version that was promoted before serves again and stays: the gate promotes nothing until you promote a version yourself.",
      yes: "Roll back",
      path: "/api/rollback",
      body: {},
      done: "Rolled back to the version before.",
    });
  }

  async #move(move) {
    const said = await confirmed(move, text(record(this.app.state).token_file, 300));
    if (said) say(byId("versions-said"), said);
    const at = document.activeElement; // the button, unless it was replaced meanwhile
    if (at === document.body || byId("ask").contains(at)) this.table.focus(text(move.body.number));
  }
}

/** A version's measures of a label, on random slates if there are any: {of: {label: {measure: value}}}. */
function measuresOf(v, label) {
  const of = record(v.measures);
  const kind = ["random", "served", "training"].find((k) => Object.keys(record(record(of[k])[label])).length);
  return kind ? record(record(of[kind])[label]) : {};
}

/** Why: in full if it was held; of the others the first line, the rest where the pointer rests. */
function why(v) {
  const reason = text(v.reason, 300);
  if (!reason) return "";
  return v.verdict === "held" ? reason : el("span", { class: "clamp", title: reason }, reason);
}

function chips(v) {
  const names = list(v.aliases, 6)
    .map((a) => text(a, 30))
    .filter(Boolean);
  if (v.serving) names.unshift("serving");
  return names.map((name) => el("span", { class: name === "serving" ? "chip main" : "chip" }, name));
}
