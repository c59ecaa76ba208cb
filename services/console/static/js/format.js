// Numbers and times for people.

export function number(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : digits);
}

export function count(value, noun, several = `${noun}s`) {
  return `${number(value)} ${value === 1 ? noun : several}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function clock(unixS) {
  return unixS ? new Date(unixS * 1000).toLocaleString(undefined, { hour12: false, month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" }) : "";
}

// Exponential mean; gaps stay gaps.
export function smooth(values, keep = 0.85) {
  let last = null;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    last = last === null ? value : keep * last + (1 - keep) * value;
    return last;
  });
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(value < 10 && unit ? 1 : 0)} ${units[unit]}`;
}
