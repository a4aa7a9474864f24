// Reading what came from outside: whatever is there, a reader gets the kind of value it asked for, or "unknown".

/** A finite number, or null: unknown is never invented. */
export const num = (x) => (typeof x === "number" && Number.isFinite(x) ? x : null);

/** Text of at most `most` characters; of anything but text, number or boolean: "". */
export const text = (x, most = 300) => {
  const s = typeof x === "string" ? x : typeof x === "number" || typeof x === "boolean" ? String(x) : "";
  return s.length > most ? `${s.slice(0, most - 1)}…` : s;
};

/** An array's first `most` entries; of anything else none. */
export const list = (x, most = 2000) => (Array.isArray(x) ? x.slice(0, most) : []);

/** An object with keys; of anything else an empty one. */
export const record = (x) => (x !== null && typeof x === "object" && !Array.isArray(x) ? x : {});

/** An array's objects. */
export const records = (x, most = 2000) => list(x, most).filter((r) => r !== null && typeof r === "object");

/** JSON as an object, or null if it is none. */
export const parsed = (json) => {
  try {
    return record(JSON.parse(json));
  } catch {
    return null;
  }
};

/** The last entry that `holds`, or null. */
export const lastOf = (items, holds = () => true) => {
  for (let i = items.length - 1; i >= 0; i--) if (holds(items[i])) return items[i];
  return null;
};
