/* Charts of points and of lines: axes, hover, focus. They know nothing of recipes' meaning. */
const HEIGHT = 400, LEFT = 62, RIGHT = 18, TOP = 14, BOTTOM = 58;

function showTip(title, pairs, at) {
  const tip = $("tip");
  tip.replaceChildren(make("b", title), facts(pairs));
  tip.hidden = false;
  pointed = at;
  placeTip();
}
let pointed = null;
/* Beside its point; scrolling moves both, and a focus may scroll. */
function placeTip() {
  const tip = $("tip");
  if (tip.hidden) return;
  const box = pointed.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const left = box.right + 12 + size.width > innerWidth ? box.left - size.width - 12 : box.right + 12;
  tip.style.left = `${Math.max(6, Math.min(left, innerWidth - size.width - 6))}px`;
  tip.style.top = `${Math.max(6, Math.min(box.top - 8, innerHeight - size.height - 6))}px`;
}
const hideTip = () => { $("tip").hidden = true; };

/* A scale from values to pixels. log: only of positive values. */
function scale(values, {log, from, to, ticks}) {
  let lo = Math.min(...values), hi = Math.max(...values);
  const f = log ? Math.log : x => x;
  if (lo === hi) [lo, hi] = log ? [lo / 1.5, hi * 1.5] : [lo - (Math.abs(lo) * .1 || 1), hi + (Math.abs(hi) * .1 || 1)];
  const pad = (f(hi) - f(lo)) * .05, [a, b] = [f(lo) - pad, f(hi) + pad];
  const at = x => from + (f(x) - a) / (b - a) * (to - from);
  const inside = x => f(x) >= a && f(x) <= b;
  return {at, ticks: (ticks || (log ? logTicks(lo, hi) : evenTicks(lo, hi))).filter(inside)};
}
function evenTicks(lo, hi) {
  const raw = (hi - lo) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * power >= raw) * power, found = [];
  for (let i = Math.floor(lo / step); i <= Math.ceil(hi / step); i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
function logTicks(lo, hi) {
  const span = Math.log10(hi / lo);
  if (span < .6) return evenTicks(lo, hi).filter(x => x > 0);
  const found = [];
  for (let p = Math.floor(Math.log10(lo)); p <= Math.ceil(Math.log10(hi)); p++) {
    for (const m of span > 3 ? [1] : [1, 2, 5]) found.push(Number((m * 10 ** p).toPrecision(6)));
  }
  return found.length > 10 ? found.filter((_, i) => i % Math.ceil(found.length / 8) === 0) : found;
}
const tick = x => Math.abs(x) >= 1000 ? x.toLocaleString("en") : x !== 0 && Math.abs(x) < .001 ? x.toExponential(0) : String(Number(x.toPrecision(4)));

/* The frame: axes, grid and labels. x, y: {values, log, flip, label, ticks, format}. */
function frame(width, x, y, title) {
  const svg = draw("svg", {class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": title});
  const sx = scale(x.values, {...x, from: LEFT, to: width - RIGHT});
  const [bottom, top] = y.flip ? [TOP, HEIGHT - BOTTOM] : [HEIGHT - BOTTOM, TOP];
  const sy = scale(y.values, {...y, from: bottom, to: top});
  let last = -Infinity;
  for (const t of sx.ticks.slice().sort((a, b) => a - b)) {
    const at = sx.at(t);
    svg.append(draw("line", {class: "gridline", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM}));
    if (at - last < 40) continue;
    last = at;
    const [text, second] = [(x.format || tick)(t)].flat();
    svg.append(draw("text", {class: "tick", x: at, y: HEIGHT - BOTTOM + 17, "text-anchor": "middle"}, text));
    if (second) svg.append(draw("text", {class: "tick", x: at, y: HEIGHT - BOTTOM + 31, "text-anchor": "middle", opacity: .75}, second));
  }
  for (const t of sy.ticks) {
    const at = sy.at(t);
    svg.append(draw("line", {class: "gridline", x1: LEFT, x2: width - RIGHT, y1: at, y2: at}),
      draw("text", {class: "tick", x: LEFT - 8, y: at + 4, "text-anchor": "end"}, (y.format || tick)(t)));
  }
  svg.append(draw("text", {class: "axis", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle"}, x.label),
    draw("text", {class: "axis", transform: `translate(14 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle"}, y.label));
  return {svg, sx, sy};
}

/* Points {x, y, low, high, recipe, title, tip, pick}. front: the points that its line joins. */
function pointChart(width, points, x, y, {front = [], join = false, hollow = false, title = ""} = {}) {
  const values = points.flatMap(p => [p.y, p.low, p.high].filter(v => has(v) && (!y.log || v > 0)));
  const {svg, sx, sy} = frame(width, {...x, values: points.map(p => p.x)}, {...y, values}, title);
  const at = p => [sx.at(p.x), sy.at(p.y)];
  if (join) for (const name of new Set(points.map(p => family(p.recipe)))) {
    const of = points.filter(p => family(p.recipe) === name).sort((a, b) => a.x - b.x);
    if (of.length > 1) svg.append(draw("polyline", {class: "family", points: of.map(at).join(" "), stroke: style(name).color}));
  }
  if (front.length) {
    const line = front.map(at).map(([px, py], i) => i ? `H${px}V${py}` : `M${px},${py}`).join("");
    svg.append(draw("path", {class: "front", d: `${line}H${width - RIGHT}`}));
  }
  for (const p of points) if (has(p.low) && (!y.log || p.low > 0)) {
    svg.append(draw("line", {class: "bar", x1: sx.at(p.x), x2: sx.at(p.x), y1: sy.at(p.low), y2: sy.at(p.high), stroke: style(p.recipe).color}));
  }
  const order = points.slice().sort((a, b) => a.x - b.x || a.y - b.y);
  const nodes = order.map((p, i) => {
    const [px, py] = at(p);
    const g = draw("g", {class: "point", transform: `translate(${px} ${py})`, tabindex: i ? -1 : 0, role: "button",
      "data-recipe": p.recipe, "aria-label": `${p.title}: ${p.tip.filter(([, v]) => has(v)).map(t => t.join(" ")).join(", ")}`});
    g.append(marker(p.recipe, 5, hollow), draw("circle", {class: "ring", r: 9}));
    const show = () => showTip(p.title, p.tip, g);
    g.addEventListener("mouseenter", show);
    g.addEventListener("focus", show);
    g.addEventListener("mouseleave", hideTip);
    g.addEventListener("blur", hideTip);
    g.addEventListener("click", p.pick);
    g.addEventListener("keydown", e => {
      const to = {ArrowRight: i + 1, ArrowLeft: i - 1, ArrowUp: i + 1, ArrowDown: i - 1, Home: 0, End: order.length - 1}[e.key];
      if (e.key === "Enter" || e.key === " ") p.pick();
      else if (e.key === "Escape") hideTip();
      else if (to === undefined) return;
      else {
        const next = nodes[Math.max(0, Math.min(order.length - 1, to))];
        nodes.forEach(n => n.setAttribute("tabindex", n === next ? 0 : -1));
        next.focus();
      }
      e.preventDefault();
    });
    return g;
  });
  svg.append(...names([...points.filter(p => p.named), ...front.length ? front : points.slice(0, 14)], at, points, width), ...nodes);
  return svg;
}

/* Names beside points, where no name and no point is. */
function names(wanted, at, points, width) {
  const taken = points.map(p => { const [x, y] = at(p); return [x - 6, y - 6, x + 6, y + 6]; });
  const free = box => taken.every(b => box[2] < b[0] || box[0] > b[2] || box[3] < b[1] || box[1] > b[3]);
  const found = [], seen = new Map();
  for (const p of wanted) {
    const name = family(p.recipe), [x, y] = at(p), w = 6.7 * name.length + 4;
    if ((seen.get(name) || 0) >= (p.named ? 1 : 2)) continue;
    const places = [[x + 9, y + 4, "start"], [x + 7, y - 8, "start"], [x - 9, y - 6, "end"], [x + 7, y + 16, "start"], [x - 9, y + 15, "end"]];
    for (const [tx, ty, anchor] of places) {
      const left = anchor === "start" ? tx : tx - w, box = [left, ty - 10, left + w, ty + 3];
      if (box[0] < LEFT || box[2] > width - 2 || !free(box)) continue;
      taken.push(box);
      seen.set(name, (seen.get(name) || 0) + 1);
      found.push(draw("text", {class: "name", x: tx, y: ty, "text-anchor": anchor}, name));
      break;
    }
  }
  return found;
}

/* Lines {xs, ys, recipe, title, tip}; one is in front while it has the pointer or the focus. */
function lineChart(width, lines, x, y, title) {
  const longest = Math.max(...lines.map(l => l.title.length));
  const room = Math.min(6.7 * longest + 4, width * .3);
  const values = lines.flatMap(l => l.ys.filter(v => has(v) && (!y.log || v > 0)));
  const {svg, sx, sy} = frame(width - room, {...x, values: lines.flatMap(l => l.xs)}, {...y, values}, title);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const drawn = lines.map((l, i) => {
    const g = draw("g", {class: "line", tabindex: i ? -1 : 0, role: "img", "data-recipe": l.recipe,
      "aria-label": `${l.title}: ${l.tip.map(t => t.join(" ")).join(", ")}`});
    const points = l.xs.map((v, j) => [v, l.ys[j]]).filter(([, v]) => has(v) && (!y.log || v > 0)).map(([a, b]) => `${sx.at(a)},${sy.at(b)}`);
    const {color, shape} = style(l.recipe);
    const dash = ["", "7 3", "2 3", "9 3 2 3", "4 2"][shape] || "";
    const path = draw("polyline", {class: "curve", points: points.join(" "), stroke: color, "stroke-dasharray": dash});
    g.append(draw("polyline", {points: points.join(" "), fill: "none", stroke: "transparent", "stroke-width": 11}), path);
    const on = () => {
      drawn.forEach(o => o.g.classList.toggle("faded", o.g !== g));
      path.classList.add("on");
      showTip(l.title, l.tip, g);
    };
    const off = () => {
      drawn.forEach(o => o.g.classList.remove("faded"));
      path.classList.remove("on");
      hideTip();
    };
    g.addEventListener("mouseenter", on);
    g.addEventListener("mouseleave", off);
    g.addEventListener("focus", on);
    g.addEventListener("blur", off);
    g.addEventListener("keydown", e => {
      const to = {ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, Home: 0, End: lines.length - 1}[e.key];
      if (to === undefined) return;
      e.preventDefault();
      drawn.forEach(o => o.g.setAttribute("tabindex", -1));
      const next = drawn[Math.max(0, Math.min(lines.length - 1, to))].g;
      next.setAttribute("tabindex", 0);
      next.focus();
    });
    return {g, end: points.length ? +points[points.length - 1].split(",")[1] : null, l};
  });
  svg.append(...drawn.map(o => o.g));
  let last = -Infinity;
  for (const o of drawn.filter(o => has(o.end)).sort((a, b) => a.end - b.end)) {
    const at = Math.max(o.end + 4, last + 14);
    if (at > HEIGHT - 4) break;
    last = at;
    const label = o.l.title.length > room / 6.6 ? `${o.l.title.slice(0, room / 6.6 - 1)}…` : o.l.title;
    svg.append(draw("text", {x: width - room - RIGHT + 8, y: at, fill: "currentColor", style: `fill: ${style(o.l.recipe).color}`}, label));
  }
  return svg;
}
