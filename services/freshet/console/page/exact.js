// JSON with whole numbers kept exactly: ids of 64 bits are beyond what a JavaScript number holds.

const WHOLE = /^-?\d+$/;

/** Parse JSON; whole numbers beyond 2^53 stay as they were written, where the browser can (JSON.rawJSON). */
export function parse(json) {
  return JSON.parse(json, (key, value, context) => {
    const beyond =
      typeof value === "number" && !Number.isSafeInteger(value) && WHOLE.test(context?.source ?? "");
    return beyond && JSON.rawJSON ? JSON.rawJSON(context.source) : value;
  });
}

export const pretty = (value) => JSON.stringify(value, null, 2);

const isRaw = (value) => JSON.isRawJSON?.(value) === true;

/** A value of JSON as a Python literal. */
export function python(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object" || isRaw(value)) return JSON.stringify(value);
  const inner = `${indent}    `;
  const parts = Array.isArray(value)
    ? value.map((v) => python(v, inner))
    : Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const flat = `${open}${parts.join(", ")}${close}`;
  return flat.length <= 88 && !flat.includes("\n")
    ? flat
    : `${open}\n${parts.map((p) => `${inner}${p},\n`).join("")}${indent}${close}`;
}

/** A word of a shell's command line. */
export const quoted = (word) => `'${word.replaceAll("'", `'\\''`)}'`;
