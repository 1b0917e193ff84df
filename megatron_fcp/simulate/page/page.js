"use strict";
window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const N = D.cp_size, WIDTH = 1240, LEFT = 58;
const COMPUTE = 0, ROW = Math.max(3, Math.min(16, Math.floor(768 / N)));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const INK = color("--ink"), SOFT = color("--soft"), LINE = color("--line");
let pass = 0, picked = 0, view = null;

function canvas(id, width, height) {
  const element = $(id), ratio = window.devicePixelRatio || 1;
  element.width = width * ratio; element.height = height * ratio;
  element.style.width = width + "px"; element.style.height = height + "px";
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  return context;
}
function text(c, string, x, y, align = "left", fill = SOFT) { c.fillStyle = fill; c.textAlign = align; c.fillText(string, x, y); }
function rankLabels(c, top, row, first = 0, last = N) {
  const every = Math.max(1, Math.ceil(14 / row));
  const step = every <= 1 ? 1 : 2 ** Math.ceil(Math.log2(every));
  for (let r = Math.ceil(first / step) * step; r < last; r += step) text(c, String(r), LEFT - 6, top + (r - first + 0.5) * row, "right");
}
const big = (n) => n.toLocaleString("en-US");
const counted = (count, what) => `${big(count)} ${what}${count === 1 ? "" : "s"}`;
const time = (us) => us >= 1000 ? (us / 1000).toFixed(2) + " ms" : us.toFixed(0) + " \u00b5s";
const megabytes = (bytes) => (bytes / 1e6).toFixed(1) + " MB";

// documents and blocks
const PALETTE = ["#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#1f78b4", "#b2182b", "#6a3d9a", "#35978f", "#f46d43"];
const longest = D.documents.map((length, d) => [length, d]).filter(([length]) => length > D.block_size)
  .sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, PALETTE.length);
const colorOf = new Map(longest.map(([, d], i) => [d, PALETTE[i]]));
const slots = [], slotOf = [];
for (let r = 0; r < N; r++) slots.push([]);
D.block_rank.forEach((r, b) => { slotOf[b] = slots[r].length; slots[r].push(b); });
const fragments = (b) => Array.from({ length: D.fragment_ptr[b + 1] - D.fragment_ptr[b] }, (_, i) => D.fragment_ptr[b] + i);
function blockColor(b) {
  let best = -1, most = 0, count = 0;
  for (const f of fragments(b)) {
    count++;
    if (colorOf.has(D.fragment_document[f]) && D.fragment_length[f] > most) { most = D.fragment_length[f]; best = D.fragment_document[f]; }
  }
  if (best >= 0) return colorOf.get(best);
  if (!count) return "#ffffff";
  const shade = Math.round(232 - 70 * Math.min(1, Math.log2(1 + count) / 6));
  return `rgb(${shade},${shade},${shade + 4})`;
}
function blockText(b) {
  const lines = fragments(b).map((f) => {
    const d = D.fragment_document[f], first = D.fragment_start[f], n = D.fragment_length[f];
    return `document ${d}: tokens ${big(first)} to ${big(first + n)} of ${big(D.documents[d])}`;
  });
  const shown = lines.slice(0, 8);
  if (lines.length > 8) shown.push(`and ${counted(lines.length - 8, "more document")}`);
  if (!lines.length) shown.push("padding");
  return `block ${b} on rank ${D.block_rank[b]} (stream tokens ${big(b * D.block_size)} to ${big((b + 1) * D.block_size)})\n`
    + shown.join("\n");
}

// who holds what
const GRID = 620, BARS = [["kernel time", "compute"], ["received", "received"], ["sent", "sent"]];
const cell = () => GRID / Math.max(1, slots[0].length);
function drawHolds() {
  const c = canvas("holds", WIDTH, N * ROW + 22), w = cell();
  rankLabels(c, 18, ROW);
  text(c, "rank", LEFT - 6, 8, "right"); text(c, "blocks, in stream order", LEFT, 8);
  for (let r = 0; r < N; r++) slots[r].forEach((b, i) => {
    c.fillStyle = blockColor(b);
    c.fillRect(LEFT + i * w, 18 + r * ROW, Math.max(w - (w > 5 ? 1 : 0), 1), ROW - (ROW > 4 ? 1 : 0));
  });
  const P = D.passes[pass];
  BARS.forEach(([name, key], k) => {
    const x = LEFT + GRID + 20 + k * 184, most = Math.max(...P[key], 1e-9);
    text(c, `${name} (most: ${key === "compute" ? time(most) : megabytes(most)})`, x, 8);
    for (let r = 0; r < N; r++) {
      c.fillStyle = LINE; c.fillRect(x, 18 + r * ROW, 168, ROW - (ROW > 3 ? 1 : 0));
      c.fillStyle = k === 0 ? color("--local") : color("--inter");
      c.fillRect(x, 18 + r * ROW, 168 * P[key][r] / most, ROW - (ROW > 3 ? 1 : 0));
    }
  });
}
function holdsTip(x, y) {
  const r = Math.floor((y - 18) / ROW), i = Math.floor((x - LEFT) / cell());
  if (r < 0 || r >= N || i < 0) return "";
  if (i < slots[r].length) return blockText(slots[r][i]);
  const P = D.passes[pass];
  return `rank ${r}: ${time(P.compute[r])} of kernels, receives ${megabytes(P.received[r])}, sends ${megabytes(P.sent[r])}`;
}

// rounds
const M = D.messages, byRound = [], moved = new Map();
M.round.forEach((k, m) => {
  (byRound[k] = byRound[k] || []).push(m);
  const pair = M.src[m] * N + M.dst[m];
  moved.set(pair, (moved.get(pair) || 0) + M.ptr[m + 1] - M.ptr[m]);
});
const MATRIX = Math.max(3, Math.floor(720 / N)), SIDE = 40;
const tierOf = (m) => Math.floor(M.src[m] / D.ranks_per_node) !== Math.floor(M.dst[m] / D.ranks_per_node);
function drawMatrix() {
  const k = Number($("round").value), size = N * MATRIX, c = canvas("matrix", WIDTH, size + SIDE + 8);
  text(c, "receiver", LEFT + size / 2, 8, "center"); text(c, "sender", LEFT - 6, SIDE - 10, "right");
  rankLabels(c, SIDE, MATRIX);
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, 30 / MATRIX)));
  for (let r = 0; r < N; r += step) text(c, String(r), LEFT + (r + 0.5) * MATRIX, SIDE - 10, "center");
  c.strokeStyle = LINE; c.strokeRect(LEFT - 0.5, SIDE - 0.5, size + 1, size + 1);
  if ($("all").checked) {
    const most = Math.max(1, ...moved.values());
    for (const [pair, blocks] of moved) {
      c.fillStyle = `rgba(47,109,181,${0.12 + 0.4 * Math.sqrt(blocks / most)})`;
      c.fillRect(LEFT + (pair % N) * MATRIX, SIDE + Math.floor(pair / N) * MATRIX, MATRIX, MATRIX);
    }
  }
  if (D.ranks_per_node > 1) {
    c.strokeStyle = "#c3cad3"; c.lineWidth = 0.5; c.beginPath();
    for (let r = 0; r <= N; r += D.ranks_per_node) {
      c.moveTo(LEFT + r * MATRIX, SIDE); c.lineTo(LEFT + r * MATRIX, SIDE + size);
      c.moveTo(LEFT, SIDE + r * MATRIX); c.lineTo(LEFT + size, SIDE + r * MATRIX);
    }
    c.stroke(); c.lineWidth = 1;
  }
  const now = byRound[k] || [];
  for (const m of now) {
    c.fillStyle = tierOf(m) ? color("--inter") : color("--intra");
    const grow = MATRIX < 5 ? 1 : 0;
    c.fillRect(LEFT + M.dst[m] * MATRIX - grow, SIDE + M.src[m] * MATRIX - grow, MATRIX + 2 * grow, MATRIX + 2 * grow);
  }
  const inter = now.filter(tierOf).length, blocks = now.reduce((sum, m) => sum + M.ptr[m + 1] - M.ptr[m], 0);
  $("roundtext").textContent = D.rounds ? `round ${k + 1} of ${D.rounds} (lower bound ${D.rounds_lower_bound}): ${counted(inter, "message")} between `
    + `nodes, ${now.length - inter} inside, ${counted(blocks, "block")}` : "nothing moves";
  let y = SIDE + 10;
  text(c, "messages of this round", LEFT + size + 24, y, "left", INK);
  const room = Math.floor((size - 20) / 15), shown = now.length > room ? now.slice(0, room - 1) : now;
  for (const m of shown) {
    const list = M.block.slice(M.ptr[m], M.ptr[m + 1]), names = runs(list);
    const cut = names.length > 46 ? names.slice(0, 45) + "\u2026" : names;
    text(c, `${M.src[m]} \u2192 ${M.dst[m]}   ${counted(list.length, "block")}: ${cut}`, LEFT + size + 24, y += 15);
  }
  if (shown.length < now.length) text(c, `and ${big(now.length - shown.length)} more; point at the matrix`, LEFT + size + 24, y += 15);
}
function runs(list) {
  const out = [];
  for (let i = 0; i < list.length;) {
    let j = i; while (j + 1 < list.length && list[j + 1] === list[j] + 1) j++;
    out.push(i === j ? String(list[i]) : `${list[i]}-${list[j]}`); i = j + 1;
  }
  return out.join(", ");
}
function matrixTip(x, y) {
  const src = Math.floor((y - SIDE) / MATRIX), dst = Math.floor((x - LEFT) / MATRIX);
  if (src < 0 || dst < 0 || src >= N || dst >= N) return "";
  const here = (byRound[Number($("round").value)] || []).filter((m) => M.src[m] === src && M.dst[m] === dst);
  const total = moved.get(src * N + dst) || 0;
  const lines = [`rank ${src} \u2192 rank ${dst}: ${counted(total, "block")} over all rounds`];
  for (const m of here) lines.push("this round: blocks " + runs(M.block.slice(M.ptr[m], M.ptr[m + 1])));
  return lines.join("\n");
}

// timeline
const HEIGHT = Math.max(240, Math.min(1024, N * 16)), GTOP = 20, GW = WIDTH - LEFT - 10;
function reset() { view = { t0: 0, t1: D.passes[pass].makespan, r0: 0, r1: N }; }
function drawGantt() {
  const c = canvas("gantt", WIDTH, HEIGHT + GTOP + 4), P = D.passes[pass], row = HEIGHT / (view.r1 - view.r0);
  const x = (t) => LEFT + (t - view.t0) / (view.t1 - view.t0) * GW, y = (r) => GTOP + (r - view.r0) * row;
  for (let i = 0; i <= 8; i++) {
    const t = view.t0 + (view.t1 - view.t0) * i / 8;
    text(c, time(t), Math.min(x(t), WIDTH - 30), 8, i ? "center" : "left");
  }
  rankLabels(c, GTOP - (view.r0 - Math.floor(view.r0)) * row, row, Math.floor(view.r0), Math.ceil(view.r1));
  c.save(); c.beginPath(); c.rect(LEFT, GTOP, GW, HEIGHT); c.clip();
  c.fillStyle = "#eef1f4"; c.fillRect(LEFT, GTOP, GW, HEIGHT);
  const gap = row > 6 ? 1 : 0, main = Math.max(1, row * 0.55), thin = Math.max(0.75, row * 0.2);
  for (let i = 0; i < P.kind.length; i++) {
    const r = P.dst[i];
    if (P.end[i] < view.t0 || P.start[i] > view.t1 || r < Math.floor(view.r0) || r >= view.r1) continue;
    const left = x(P.start[i]), width = Math.max(x(P.end[i]) - left, 0.4);
    if (P.kind[i] === COMPUTE) {
      c.fillStyle = P.stage[i] === 0 ? color("--local") : (P.stage[i] % 2 ? "#79aee6" : "#5b97d8");
      c.fillRect(left, y(r) + gap, width, main);
    } else {
      c.fillStyle = P.tier[i] ? color("--inter") : color("--intra");
      c.fillRect(left, y(r) + gap + main + (P.tier[i] ? 0 : thin), width, thin);
    }
  }
  if (picked >= view.r0 && picked < view.r1) { c.strokeStyle = INK; c.strokeRect(LEFT, y(picked), GW, row); }
  c.restore();
  drawDetail();
}
const LANES = ["kernels", "receive, between nodes", "send, between nodes", "receive, inside node", "send, inside node"];
function lanes(i, r) {
  const P = D.passes[pass];
  if (P.kind[i] === COMPUTE) return P.dst[i] === r ? [0] : [];
  const out = [];
  if (P.dst[i] === r) out.push(P.tier[i] ? 1 : 3);
  if (P.src[i] === r) out.push(P.tier[i] ? 2 : 4);
  return out;
}
function drawDetail() {
  const c = canvas("detail", WIDTH, LANES.length * 22 + 4), P = D.passes[pass], left = 160, width = WIDTH - left - 10;
  $("detailtitle").textContent = `Rank ${picked}: ${time(P.compute[picked])} of kernels, done after ${time(P.finish[picked])} of ${time(P.makespan)}`;
  LANES.forEach((name, k) => { text(c, name, left - 8, k * 22 + 12, "right"); c.fillStyle = "#eef1f4"; c.fillRect(left, k * 22 + 2, width, 18); });
  const x = (t) => left + (t - view.t0) / (view.t1 - view.t0) * width;
  c.save(); c.beginPath(); c.rect(left, 0, width, LANES.length * 22); c.clip();
  for (let i = 0; i < P.kind.length; i++) for (const lane of lanes(i, picked)) {
    const a = x(P.start[i]), w = Math.max(x(P.end[i]) - a - 0.5, 0.6);
    c.fillStyle = lane === 0 ? (P.stage[i] === 0 ? color("--local") : "#79aee6") : lane < 3 ? color("--inter") : color("--intra");
    c.fillRect(a, lane * 22 + 2, w, 18);
    const label = lane === 0 ? (P.stage[i] ? String(P.stage[i]) : "local") : String(lane % 2 ? P.src[i] : P.dst[i]);
    if (w > 8 * label.length + 4) text(c, label, a + w / 2, lane * 22 + 11, "center", "#fff");
  }
  c.restore();
}
function opText(i) {
  const P = D.passes[pass], when = `${time(P.start[i])} to ${time(P.end[i])}`;
  if (P.kind[i] === COMPUTE) return `rank ${P.dst[i]}, ${P.stage[i] ? "stage " + P.stage[i] : "local attention"}\n${when}`;
  const what = P.round[i] >= D.rounds ? `dKV back, push round ${P.round[i] - D.rounds + 1}` : `KV, round ${P.round[i] + 1}, for stage ${P.stage[i]}`;
  return `rank ${P.src[i]} \u2192 rank ${P.dst[i]}, ${P.tier[i] ? "between nodes" : "inside the node"}\n${what}, ${megabytes(P.bytes[i])}\n${when}`;
}
function ganttTip(px, py) {
  const P = D.passes[pass], row = HEIGHT / (view.r1 - view.r0);
  const r = Math.floor(view.r0 + (py - GTOP) / row), t = view.t0 + (px - LEFT) / GW * (view.t1 - view.t0);
  if (r < 0 || r >= N || px < LEFT || py < GTOP) return "";
  const lines = [];
  for (let i = 0; i < P.kind.length; i++) if (P.dst[i] === r && P.start[i] <= t && t < P.end[i]) lines.push(opText(i));
  return lines.length ? lines.join("\n") : `rank ${r} waits (${time(t)})`;
}
function detailTip(px, py) {
  const P = D.passes[pass], lane = Math.floor(py / 22), t = view.t0 + (px - 160) / (WIDTH - 170) * (view.t1 - view.t0);
  for (let i = 0; i < P.kind.length; i++) if (P.start[i] <= t && t < P.end[i] && lanes(i, picked).includes(lane)) return opText(i);
  return "";
}

// wiring
function tips(id, find) {
  const element = $(id), tip = $("tip");
  element.addEventListener("mousemove", (event) => {
    const box = element.getBoundingClientRect(), string = find(event.clientX - box.left, event.clientY - box.top);
    tip.textContent = string; tip.style.display = string ? "block" : "none";
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 430) + "px"; tip.style.top = event.clientY + 14 + "px";
  });
  element.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}
function setRound(k) { $("round").value = Math.max(0, Math.min(D.rounds - 1, k)); drawMatrix(); }
function setPass(k) {
  pass = k; reset();
  [...$("passes").children].forEach((button, i) => button.classList.toggle("on", i === k));
  drawHolds(); drawGantt();
}
$("title").textContent = D.title;
$("figures").textContent = D.figures;
D.passes.forEach((P, k) => {
  const button = document.createElement("button");
  button.textContent = `${P.name}: ${(P.efficiency * 100).toFixed(1)}% of the kernels\u2019 speed, ${time(P.makespan)}`;
  button.addEventListener("click", () => setPass(k));
  $("passes").append(button, " ");
});
for (const [length, d] of longest) {
  const item = document.createElement("span"), key = document.createElement("i");
  key.style.background = colorOf.get(d); item.append(key, `document ${d}, ${big(length)} tokens`); $("legend").append(item);
}
$("round").max = Math.max(0, D.rounds - 1);
$("round").addEventListener("input", drawMatrix);
$("all").addEventListener("change", drawMatrix);
$("back").addEventListener("click", () => setRound(Number($("round").value) - 1));
$("next").addEventListener("click", () => setRound(Number($("round").value) + 1));
let timer = null;
$("play").addEventListener("click", () => {
  if (timer) { clearInterval(timer); timer = null; } else timer = setInterval(() => setRound((Number($("round").value) + 1) % Math.max(1, D.rounds)), 250);
  $("play").textContent = timer ? "stop" : "play";
});
const gantt = $("gantt");
gantt.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = gantt.getBoundingClientRect(), f = event.deltaY < 0 ? 0.8 : 1.25;
  const a = (event.clientX - box.left - LEFT) / GW, b = (event.clientY - box.top - GTOP) / HEIGHT;
  const t = view.t0 + a * (view.t1 - view.t0), r = view.r0 + b * (view.r1 - view.r0);
  const dt = Math.min((view.t1 - view.t0) * f, D.passes[pass].makespan), dr = Math.max(Math.min((view.r1 - view.r0) * f, N), Math.min(4, N));
  view.t0 = Math.max(0, Math.min(t - a * dt, D.passes[pass].makespan - dt)); view.t1 = view.t0 + dt;
  view.r0 = Math.max(0, Math.min(r - b * dr, N - dr)); view.r1 = view.r0 + dr;
  drawGantt();
}, { passive: false });
let drag = null;
gantt.addEventListener("mousedown", (event) => { drag = { x: event.clientX, y: event.clientY, ...view }; });
window.addEventListener("mouseup", () => { drag = null; });
gantt.addEventListener("mousemove", (event) => {
  if (!drag) return;
  const dt = drag.t1 - drag.t0, dr = drag.r1 - drag.r0;
  view.t0 = Math.max(0, Math.min(drag.t0 - (event.clientX - drag.x) / GW * dt, D.passes[pass].makespan - dt)); view.t1 = view.t0 + dt;
  view.r0 = Math.max(0, Math.min(drag.r0 - (event.clientY - drag.y) / HEIGHT * dr, N - dr)); view.r1 = view.r0 + dr;
  drawGantt();
});
gantt.addEventListener("dblclick", () => { reset(); drawGantt(); });
gantt.addEventListener("click", (event) => {
  const row = HEIGHT / (view.r1 - view.r0);
  picked = Math.max(0, Math.min(N - 1, Math.floor(view.r0 + (event.clientY - gantt.getBoundingClientRect().top - GTOP) / row)));
  drawGantt();
});
tips("holds", holdsTip); tips("matrix", matrixTip); tips("gantt", ganttTip); tips("detail", detailTip);
picked = D.passes[0].finish.indexOf(Math.max(...D.passes[0].finish));
setPass(0); setRound(0);
document.body.dataset.ready = "1";
