"use strict";
/* What every page of kvloom uses: its data, and elements. */
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (name, text, cls) => {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
};
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
const mean = xs => xs.length ? xs.reduce((a, b) => a + b, 0) / xs.length : null;
const has = x => x !== null && x !== undefined;
const percent = (x, digits = 1) => has(x) ? `${(100 * x).toFixed(digits)}%` : "–";
function options(select, list, value) {
  select.replaceChildren(...list.map(([v, text]) => {
    const o = make("option", text);
    o.value = v;
    return o;
  }));
  if (has(value) && list.some(([v]) => String(v) === String(value))) select.value = value;
}
