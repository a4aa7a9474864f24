// The top of the page: what a person across the room wants to know.

import { byId, el, mark, say, show } from "./dom.js";
import { ago, count, duration, fixed, part, times } from "./format.js";
import { figure, lastMinute } from "./learning.js";
import { recent } from "./quality.js";
import { list, num, record, records, text } from "./read.js";

const HEALTH = { good: "● all good", degraded: "▲ degraded", starting: "◐ starting", down: "✕ down" };
const CONNECTION = { live: "● live", connecting: "◐ connecting", lost: "✕ no connection" };

const SHOWN_NOTES = 8;

export class Glance {
  constructor() {
    this.tiles = [
      "serving version",
      "freshness",
      "samples learned per second",
      "click rate",
      "ranking (AUC)",
      "calibration",
    ].map((name) => {
      const value = el("dd", { class: "value" }, "–");
      const detail = el("dd", { class: "detail" }, "\u00a0");
      const term = el("dt", {}, name);
      byId("glance").append(el("div", {}, term, value, detail));
      return { term, value, detail };
    });
    this.heard = ""; // what screen readers were told last
  }

  connection(status) {
    const node = byId("connection");
    say(node, CONNECTION[status]);
    mark(node, "data-level", status === "live" ? "ok" : status === "lost" ? "bad" : "unknown");
    this.#tell(
      status === "live" ? "Connected." : status === "lost" ? "Connection lost, trying again." : "Connecting.",
    );
  }

  update(state, app) {
    const health = text(state.health, 20);
    const pill = byId("health");
    const words = HEALTH[health] ?? "unknown";
    if (pill.textContent !== words)
      this.#tell(
        `Health: ${health || "unknown"}. ${list(state.notes, 3)
          .map((n) => text(n))
          .join(". ")}`,
      );
    say(pill, words);
    mark(
      pill,
      "data-level",
      { good: "ok", degraded: "warn", starting: "idle", down: "bad" }[health] ?? "unknown",
    );
    say(byId("model"), text(state.model, 80) || "no model");
    document.title = `${text(state.model, 40) || "freshet"}: ${words.slice(2) || words} · freshet`;
    const notes = list(state.notes);
    const more = notes.length - SHOWN_NOTES;
    this.#notes([
      ...notes.slice(0, SHOWN_NOTES).map((n) => text(n)),
      ...(more > 0 ? [`and ${more} more, see Services`] : []),
    ]);
    this.#tiles(state, app);
    const about = [`freshet ${text(state.freshet, 20)}`, text(state.folder, 200)].filter((s) => s.trim());
    say(byId("about"), about.join(" · "));
  }

  #tell(words) {
    if (words === this.heard) return;
    this.heard = words;
    say(byId("say"), words);
  }

  #notes(notes) {
    const host = byId("notes");
    show(host, notes.length > 0);
    const key = JSON.stringify(notes);
    if (host.dataset.key === key) return;
    host.dataset.key = key;
    host.replaceChildren(...notes.map((n) => el("li", {}, n)));
  }

  #tiles(state, app) {
    const versions = record(state.versions);
    const serving = num(versions.serving);
    const since = records(versions.list, 50).find((v) => v.number === serving);
    const rate = (from, to) =>
      num(record(records(state.edges, 50).find((e) => e.from === from && e.to === to)).rate);
    const clicks = lastMinute(app);
    const shown = figure(app);
    say(this.tiles[3].term, shown.name);
    const label = app.label();
    const of =
      ["random", "served", "training"].find((kind) => app.history.of(kind, label).length) ?? "random";
    const quality = recent(app.history.of(of, label));
    const where =
      quality === null ? "no window has closed yet" : of === "random" ? "random slates" : "all samples";
    const popular = recent(app.history.of("popularity", label));
    const figures = [
      [
        serving === null ? "–" : `v${serving}`,
        since ? `made ${ago(num(since.created_ms), app.now())}` : "none served yet",
      ],
      [duration(num(state.freshness_ms)), "behind the newest event"],
      [count(rate("joiner", "trainer")), `${count(rate("client", "gateway"))} events/s come in`],
      clicks.model === null
        ? ["–", shown.clicks ? "no clicks counted yet" : "no window has closed yet"]
        : [
            shown.format(clicks.model),
            clicks.random > 0
              ? `${times(clicks.model, clicks.random)} × random${clicks.best ? `, ${part(clicks.model, clicks.best)} of best` : ""}`
              : "no random slates",
          ],
      [
        fixed(quality?.auc ?? null),
        popular === null || popular.auc === null ? where : `${where}; popularity ${fixed(popular.auc)}`,
      ],
      [fixed(quality?.calibration ?? null, 2), quality === null ? where : "predicted / observed, last 2 min"],
    ];
    figures.forEach(([value, detail], i) => {
      say(this.tiles[i].value, value);
      say(this.tiles[i].detail, detail);
    });
  }
}
