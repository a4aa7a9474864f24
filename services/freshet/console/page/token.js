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

/** Ask; on yes, POST `body` to `path` with the token. Resolves to whether it was done; what went wrong is shown and may be tried again. */
export function confirmed({ title, what, yes, path, body }, file) {
  const dialog = byId("ask");
  const input = byId("token");
  say(byId("ask-title"), title);
  say(byId("ask-what"), what);
  say(byId("ask-yes"), yes);
  say(byId("ask-wrong"), "");
  say(byId("ask-file"), file || "state/console.token");
  input.value = "";
  show(byId("ask-token"), !token());
  dialog.showModal();
  return new Promise((resolve) => {
    const over = new AbortController();
    const close = (done) => {
      over.abort();
      dialog.close();
      resolve(done);
    };
    const go = async () => {
      const given = input.value.trim() || token();
      if (!given) return void say(byId("ask-wrong"), "The token is missing.");
      byId("ask-yes").disabled = true;
      try {
        await getJson(path, {
          method: "POST",
          headers: { authorization: `Bearer ${given}`, "content-type": "application/json" },
          body: JSON.stringify(body),
        });
        keep(given);
        close(true);
      } catch (error) {
        say(byId("ask-wrong"), `Nothing was changed: ${error.message}`);
        show(byId("ask-token"), true);
      } finally {
        byId("ask-yes").disabled = false;
      }
    };
    const { signal } = over;
    byId("ask-form").addEventListener("submit", (event) => (event.preventDefault(), go()), { signal });
    byId("ask-no").addEventListener("click", () => close(false), { signal });
    dialog.addEventListener("cancel", (event) => (event.preventDefault(), close(false)), { signal });
  });
}
