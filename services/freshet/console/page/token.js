// The console's token, and asking before anything is changed with it.

import { byId, say, show } from "./dom.js";
import { getJson } from "./feed.js";

const KEY = "freshet.token";

/** Keep the token of an address that ends in #token=…, for this tab only, and take it out of the address. */
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  keep(decoded(found[1]));
  history.replaceState(null, "", location.pathname + location.search);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function keep(token) {
  try {
    sessionStorage.setItem(KEY, token);
  } catch {
    kept = token; // storage may be forbidden
  }
}

let kept = null;

function token() {
  try {
    return sessionStorage.getItem(KEY) ?? kept;
  } catch {
    return kept;
  }
}

/** The header that shows the token, if this page has one. */
export function authorization() {
  const given = token();
  return given ? { authorization: `Bearer ${given}` } : {};
}

let question = null; // AbortController of the last one: its abort ends it

/**
 * Ask; on yes, POST `body` to `path` with the token. Resolves to what is to be said of it: `done`, or "" if it was
 * cancelled. What went wrong is shown and may be tried again.
 *
 * What is sent cannot be cancelled. A browser may close the dialog all the same; the answer then is what resolves.
 */
export function confirmed({ title, what, yes, path, body, done }, file) {
  const dialog = byId("ask");
  const input = byId("token");
  question?.abort();
  question = new AbortController();
  const { signal } = question;
  const end = question.abort.bind(question);
  let sent = false;
  const sends = (now) => {
    sent = now;
    if (!signal.aborted) for (const id of ["ask-yes", "ask-no"]) byId(id).disabled = now;
  };
  sends(false);
  say(byId("ask-title"), title);
  say(byId("ask-what"), what);
  say(byId("ask-yes"), yes);
  say(byId("ask-wrong"), "");
  say(byId("ask-file"), file || "state/console.token");
  input.value = "";
  show(byId("ask-token"), !token());
  dialog.showModal();
  return new Promise((resolve) => {
    const go = async () => {
      const given = input.value.trim() || token();
      if (!given) return void say(byId("ask-wrong"), "The token is missing.");
      sends(true);
      try {
        await getJson(path, {
          method: "POST",
          headers: { authorization: `Bearer ${given}`, "content-type": "application/json" },
          body: JSON.stringify(body),
        });
        keep(given);
        resolve(done);
        end();
      } catch (error) {
        const wrong = `Nothing was changed: ${error.message}`;
        if (signal.aborted) return void resolve(`${title} ${wrong}`);
        say(byId("ask-wrong"), wrong);
        show(byId("ask-token"), true);
      } finally {
        sends(false);
      }
    };
    signal.addEventListener("abort", () => {
      dialog.close();
      if (!sent) resolve("");
    });
    byId("ask-form").addEventListener("submit", (event) => (event.preventDefault(), go()), { signal });
    byId("ask-no").addEventListener("click", end, { signal });
    dialog.addEventListener("cancel", (event) => sent && event.preventDefault(), { signal });
    dialog.addEventListener("close", () => dialog.open || end(), { signal });
  });
}
