// Numbers, sizes and times as people read them. Unknown (null) is a dash.

export const UNKNOWN = "–";
const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** `value` with about three digits and a suffix of thousands: 950, 1,234, 12.3k, 4.56M. */
export function count(value) {
  if (value === null) return UNKNOWN;
  const size = Math.abs(value);
  if (size < 9.5) return trimmed(value.toFixed(size < 0.95 ? 2 : 1));
  if (size < 10_000) return GROUPED.format(value);
  for (const [unit, suffix] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (size >= unit && size < unit * 1000) return digits(value / unit) + suffix;
  }
  return value.toExponential(1);
}

/** A whole number in full, for tables: 1,234,567. */
export function whole(value) {
  if (value === null) return UNKNOWN;
  return Math.abs(value) < 1e12 ? GROUPED.format(value) : value.toExponential(2);
}

/** "1,012 events/s" */
export const rate = (value, unit = "/s") =>
  value === null ? `${UNKNOWN} ${unit}` : `${count(value)} ${unit}`;

/** Bytes with a binary unit: 512 B, 1.2 MiB. */
export function bytes(value) {
  if (value === null) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let left = Math.abs(value);
  let i = 0;
  while (left >= 1024 && i < units.length - 1) {
    left /= 1024;
    i += 1;
  }
  if (left >= 1e5) return `${value.toExponential(1)} B`;
  return `${value < 0 ? "−" : ""}${i === 0 ? left.toFixed(0) : digits(left)} ${units[i]}`;
}

/** Megabytes as a service reports them: 57 MB. */
export const megabytes = (value) => (value === null ? UNKNOWN : `${count(Math.round(value * 10) / 10)} MB`);

/** Milliseconds as a length of time: 8 ms, 430 ms, 1.2 s, 3 min, 5 h, 2 d. */
export function duration(ms) {
  if (ms === null) return UNKNOWN;
  const size = Math.abs(ms);
  if (size < 999.5) return `${trimmed(ms.toFixed(size < 10 ? 1 : 0))} ms`;
  if (size < 9_950) return `${(ms / 1000).toFixed(1)} s`;
  if (size < 99_500) return `${Math.round(ms / 1000)} s`;
  if (size < 5_970_000) return `${Math.round(ms / 60_000)} min`;
  if (size < 172_000_000) return `${Math.round(ms / 3_600_000)} h`;
  if (size < 1e13) return `${GROUPED.format(Math.round(ms / 86_400_000))} d`;
  return `${(ms / 86_400_000).toExponential(1)} d`;
}

/** How long before `now` something was: "12 s ago", "just now". */
export function ago(time, now) {
  if (time === null || now === null) return UNKNOWN;
  const past = now - time;
  if (past < -2000) return `in ${duration(-past)}`;
  return past < 1500
    ? "just now"
    : `${duration(Math.max(1000, Math.round(past / 1000) * 1000)).replace(".0", "")} ago`;
}

/** A share as a percentage: 12.3 %, 0.45 %. */
export function percent(share) {
  if (share === null) return UNKNOWN;
  const value = share * 100;
  if (Math.abs(value) >= 1e6) return `${value.toExponential(1)} %`;
  return `${value.toFixed(value === 0 || Math.abs(value) >= 99.5 ? 0 : Math.abs(value) >= 1 ? 1 : 2)} %`;
}

/** How much of another figure one is: 94 %. */
export const part = (value, of) =>
  of > 0 && value / of < 1e4 ? `${Math.round((value / of) * 100)} %` : UNKNOWN;

/** How many times another figure one is: 3.4. */
export const times = (value, of) => (of > 0 ? count(value / of) : UNKNOWN);

/** At most `most` round numbers from 0 to `top`, the distances 1, 2, 2.5 or 5 times a power of ten. */
export function rounds(top, most = 5) {
  const power = 10 ** Math.floor(Math.log10(top / most));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => top / s <= most) ?? top;
  return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** A figure with `places` decimals: AUC .713 is 0.713. */
export function fixed(value, places = 3) {
  if (value === null) return UNKNOWN;
  return Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toFixed(places).replace("-", "−");
}

/** The mean of a label that is a number: 0.123, 5, 20.3, 1235. */
export function amount(value) {
  const size = Math.abs(value);
  return size < 1e6 ? trimmed(fixed(value, size < 10 ? 3 : size < 1000 ? 1 : 0)) : fixed(value);
}

/** With its sign: +0.012, −0.004. */
export function signed(value, places = 3) {
  if (value === null) return UNKNOWN;
  const shown = fixed(value, places);
  return value > 0 ? `+${shown}` : shown;
}

/** Time of day, with seconds where they matter. */
export function clock(ms, seconds = true) {
  if (ms === null || Math.abs(ms) > 8.64e15) return UNKNOWN;
  const d = new Date(ms);
  const two = (n) => String(n).padStart(2, "0");
  return `${two(d.getHours())}:${two(d.getMinutes())}${seconds ? `:${two(d.getSeconds())}` : ""}`;
}

/** "1 version", "2 versions" */
export const plural = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;

const digits = (x) => trimmed(x.toFixed(x >= 99.95 ? 0 : x >= 9.995 ? 1 : 2));
const trimmed = (s) => (s.includes(".") ? s.replace(/\.?0+$/, "") : s);
