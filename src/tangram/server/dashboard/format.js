// Format: numbers as words. Owns every displayed unit; does not depend on the page.

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});

/** 12,345 */
export function count(n) {
  return whole.format(n);
}

/** "1 action", "3 actions" */
export function counted(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** With the significant digits: 0.42, 3.4, 28. */
export function number(x) {
  const size = Math.abs(x);
  if (size >= 100) return whole.format(x);
  if (size >= 10) return trimmed(x.toFixed(1));
  return trimmed(x.toFixed(2));
}

function trimmed(digits) {
  return digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits;
}

/** A length of time: 0 s, 340 ms, 3.4 s, 2 min 5 s, 3 h 12 min, 2 d 4 h. */
export function duration(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 0) return `−${duration(-s)}`;
  if (s === 0) return "0 s";
  if (s < 0.0005) return `${Math.max(1, Math.round(s * 1e6))} µs`;
  if (s < 0.00995) return `${trimmed((s * 1000).toFixed(1))} ms`;
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95) return `${Number.isInteger(s) ? s : s.toFixed(1)} s`;
  if (s < 99.5) return `${Math.round(s)} s`;
  return longer(Math.round(s));
}

function longer(s) {
  if (s < HOUR) return pair(Math.floor(s / MINUTE), "min", s % MINUTE, "s");
  if (s < DAY) return pair(Math.floor(s / HOUR), "h", Math.floor((s % HOUR) / MINUTE), "min");
  return pair(Math.floor(s / DAY), "d", Math.floor((s % DAY) / HOUR), "h");
}

function pair(large, largeUnit, small, smallUnit) {
  return small ? `${count(large)} ${largeUnit} ${small} ${smallUnit}` : `${count(large)} ${largeUnit}`;
}

/** For an axis of round lengths: 5 s, 2.5 s, 100 s. */
export function axisDuration(s) {
  return s >= 1 && s < 1000 ? `${trimmed(s.toFixed(2))} s` : duration(s);
}

/** A share: 0 %, 0.4 %, 37 %. */
export function percent(part) {
  const value = part * 100;
  if (!Number.isFinite(value)) return "–";
  if (value > 0 && value < 0.05) return "< 0.1 %";
  if (value > 0 && value < 0.95) return `${value.toFixed(1)} %`;
  return `${Math.round(value)} %`;
}

/** Units of a pool with their name: 1.5 cores, 2.4 GiB, 3 devices, 12 requests. */
export function units(n, unit) {
  return `${amount(n, unit)} ${unitName(n, unit)}`;
}

/** "12.5 of 16 cores": one unit for both. */
export function unitsOf(n, total, unit) {
  if (unit === "MiB") {
    const [scale, name] = total >= 1024 ? [1024, "GiB"] : [1, "MiB"];
    return `${number(n / scale)} of ${number(total / scale)} ${name}`;
  }
  return `${amount(n, unit)} of ${units(total, unit)}`;
}

function amount(n, unit) {
  if (unit === "milli-cores") return number(n / 1000);
  if (unit === "MiB") return n >= 1024 ? number(n / 1024) : count(n);
  return count(n);
}

function unitName(n, unit) {
  if (unit === "milli-cores") return n === 1000 ? "core" : "cores";
  if (unit === "MiB") return n >= 1024 ? "GiB" : "MiB";
  return n === 1 ? unit.replace(/s$/, "") : unit;
}

/** The time of day of a moment in seconds since 1970, in the local time zone. */
export function timeOfDay(at, digits = 0) {
  const date = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (!digits) return clock;
  const part = ((at % 1) + 1) % 1;
  return `${clock}.${String(Math.floor(part * 10 ** digits + 1e-6)).padStart(digits, "0")}`;
}

/** Date and time, for titles. */
export function moment(at) {
  return new Date(at * 1000).toLocaleString();
}

/** A status or a state in words: timed_out is "timed out". */
export function words(status) {
  return status.replaceAll("_", " ");
}
