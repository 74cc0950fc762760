/** Numbers as people read them, always with their unit. */

const BYTES = ["B", "kB", "MB", "GB", "TB"];

/** At most three digits that count: 0.42, 4.2, 42, 420. */
function brief(value) {
  const digits = value >= 99.95 || value === 0 ? 0 : value >= 9.995 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Bytes in powers of 1000. */
export function bytes(value) {
  let [size, unit] = [value, 0];
  while (size >= 999.5 && unit < BYTES.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(size) : brief(size)} ${BYTES[unit]}`;
}

/** Things that are counted. */
export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** A mean of things that are counted. */
export function mean(value) {
  return brief(value);
}

/** Tokens in a second. */
export function speed(value) {
  return `${brief(value)} tok/s`;
}

/** Tokens in a second, in few characters. */
export function shortSpeed(value) {
  const written = value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  return `${written} tok/s`;
}

/** Seconds, or thousandths of them. */
export function time(seconds) {
  if (seconds < 0.9995) return `${brief(seconds * 1000)} ms`;
  return `${brief(seconds)} s`;
}

/** A part of a whole. */
export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "0 %";
}

/** A part of a whole that may be small. */
export function smallPercent(part, whole) {
  return whole > 0 ? `${brief((100 * part) / whole)} %` : "0 %";
}

/** A part of a whole that may be nearly all of it: 100 % only where nothing is missing. */
export function nearPercent(part, whole) {
  if (!(whole > 0)) return "–";
  if (part >= whole) return "100 %";
  return `${(Math.floor((1000 * part) / whole) / 10).toFixed(1)} %`;
}

/** How long something goes on. */
export function duration(seconds) {
  const whole = Math.floor(seconds);
  const [days, hours] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24];
  const minutes = Math.floor(whole / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${whole} s`;
}
