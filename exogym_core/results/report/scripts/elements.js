// Elements, and numbers as texts. Names are text, never markup.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function swatch(colour, dash) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const set = (target, all) => Object.entries(all).forEach(([name, value]) => target.setAttribute(name, value));
  set(svg, { width: 22, height: 10, "aria-hidden": "true" });
  set(line, { x1: 0, x2: 22, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash.join(" ") });
  svg.append(line);
  return svg;
}

const isMissing = (value) => value === null || value === undefined;
const number = (value, digits = 4) =>
  isMissing(value) ? "" : String(Number(value.toPrecision(digits))).replace("e+", "e");
/** A value in the first unit whose least value it reaches; units are [least value, name, size if not that]. */
const scaled = (value, units, digits) => {
  const [least, unit, size = least] = units.find(([least]) => Math.abs(value) >= least) || units.at(-1);
  return `${number(value / size, digits)} ${unit}`;
};
/** A time, as `netsim.units.format_seconds` writes it. */
const seconds = (value, digits = 4) => {
  for (const [least, unit, part, size] of [[3600, "h", "min", 60], [120, "min", "s", 1]]) {
    if (value < least) continue;
    const whole = Math.round(value / size);
    return `${Math.floor(whole / 60)} ${unit}` + (whole % 60 ? ` ${whole % 60} ${part}` : "");
  }
  return value === 0 ? "0 s" : scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"]], digits);
};
const bytes = (value, digits = 4) =>
  value === 0 ? "0 B" : scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]], digits);
const rate = (value, digits = 4) =>
  value === 0 ? "0" : scaled(value, [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"], [1, "bit/s"]], digits);
const WRITE = { time: seconds, steps: number, bytes };
