// The explorer: a scatter of submodels, a budget, the best within it, and how to export that one. No library, nothing fetched.
"use strict";
(() => {
  const root = document.getElementById("explorer");
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const byId = (id) => document.getElementById(id);
  const make = (name, attributes, parent, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const UNITS = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"], [1, ""]];
  const short = (value) => {
    const [size, unit] = UNITS.find(([least]) => value >= least) || [1, ""];
    return String(Number((value / size).toPrecision(3))) + unit;
  };
  const percent = (value) => (100 * value).toFixed(2) + " %";
  let kind = data.kinds[0].key;
  let budget = Infinity;
  let sorted = { key: "score", down: true };

  const cost = (entry) => entry.costs[kind];
  const best = () => {
    const within = data.finalists.filter((entry) => cost(entry) <= budget);
    return within.reduce((one, other) => {
      if (one === null || other.score > one.score) return other;
      return other.score === one.score && cost(other) < cost(one) ? other : one;
    }, null);
  };
  const front = () => {
    const found = [];
    for (const entry of [...data.finalists].sort((a, b) => cost(a) - cost(b) || b.score - a.score)) {
      if (!found.length || entry.score > found[found.length - 1].score) found.push(entry);
    }
    return found;
  };

  function scatter(picked) {
    const svg = byId("explorer-scatter");
    svg.replaceChildren();
    const [width, height, left, right, top, bottom] = [640, 376, 48, 14, 28, 44];
    const judged = data.judged.filter((entry) => kind in entry.costs);
    const shown = [...judged, ...data.finalists];
    const costs = shown.map(cost);
    const scores = shown.map((entry) => entry.score);
    const [low, high] = [Math.min(...costs), Math.max(...costs)];
    const [worst, bestScore] = [Math.min(...scores), Math.max(...scores)];
    const x = (value) => left + ((value - low) / (high - low || 1)) * (width - left - right);
    const y = (value) => height - bottom - ((value - worst) / (bestScore - worst || 1)) * (height - top - bottom);
    for (let step = 0; step <= 4; step += 1) {
      const value = worst + ((bestScore - worst) * step) / 4;
      make("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }, svg);
      make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, svg, (100 * value).toFixed(1));
      const across = low + ((high - low) * step) / 4;
      const anchor = step === 0 ? "start" : step === 4 ? "end" : "middle";
      make("text", { x: x(across), y: height - bottom + 16, "text-anchor": anchor }, svg, short(across));
    }
    const title = data.kinds.find((entry) => entry.key === kind).title;
    make("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, svg, title);
    make("text", { x: 0, y: 14 }, svg, data.metric + " on validation data, %");
    if (Number.isFinite(budget) && budget < high) {
      make("rect", { class: "beyond", x: x(budget), y: top, width: width - right - x(budget), height: height - top - bottom }, svg);
    }
    for (const entry of judged) make("circle", { class: "judged", cx: x(cost(entry)), cy: y(entry.score), r: 2.5 }, svg);
    const points = front().map((entry) => x(cost(entry)) + "," + y(entry.score)).join(" ");
    make("polyline", { class: "front", points }, svg);
    for (const entry of data.finalists) {
      const mark = { class: entry === picked ? "picked" : "finalist", cx: x(cost(entry)), cy: y(entry.score), r: entry === picked ? 8 : 5 };
      const dot = make("circle", mark, svg);
      make("title", {}, dot, "number " + entry.number + ": " + percent(entry.score) + ", " + short(cost(entry)));
      dot.addEventListener("click", () => setBudget(cost(entry)));
    }
  }

  function widths(picked) {
    const svg = byId("explorer-widths");
    svg.replaceChildren();
    if (picked === null) return;
    const rows = new Map();
    for (const [group, size] of Object.entries(picked.sizes)) {
      const number = group.match(/\d+/);
      const name = group.replace(/\.?\d+\.?/, " ").trim();
      if (!rows.has(name)) rows.set(name, []);
      rows.get(name).push({ group, layer: number === null ? "" : number[0], size, full: data.full[group] });
    }
    const columns = Math.max(...[...rows.values()].map((row) => row.length));
    const [label, cell, tall, gap] = [110, Math.min(44, 500 / columns), 46, 26];
    svg.setAttribute("viewBox", "0 0 " + (label + columns * cell + 6) + " " + rows.size * (tall + gap));
    svg.style.maxWidth = label + columns * cell + 6 + "px";
    let top = 0;
    for (const [name, row] of rows) {
      make("text", { x: 0, y: top + tall / 2 + 4 }, svg, name);
      row.forEach((entry, place) => {
        const left = label + place * cell;
        const part = (tall * entry.size) / entry.full;
        make("rect", { class: "whole", x: left + 2, y: top, width: cell - 4, height: tall }, svg);
        const bar = make("rect", { class: "kept", x: left + 2, y: top + tall - part, width: cell - 4, height: part }, svg);
        make("title", {}, bar, entry.group + ": " + entry.size + " of " + entry.full);
        make("text", { x: left + cell / 2, y: top + tall + 14, "text-anchor": "middle" }, svg, cell > 24 ? entry.size : entry.layer);
      });
      top += tall + gap;
    }
    svg.setAttribute("aria-label", "Widths of submodel number " + picked.number);
  }

  function table(picked) {
    const keyed = (entry) => (sorted.key === "score" || sorted.key === "number" ? entry[sorted.key] : entry.costs[sorted.key]);
    const rows = [...data.finalists].sort((a, b) => (keyed(a) - keyed(b)) * (sorted.down ? -1 : 1));
    const body = byId("explorer-rows");
    body.replaceChildren();
    for (const entry of rows) {
      const line = document.createElement("tr");
      if (entry === picked) line.className = "picked";
      const cells = [entry.number, percent(entry.score), ...data.kinds.map((each) => short(entry.costs[each.key]))];
      for (const text of cells) {
        const cell = document.createElement("td");
        cell.textContent = text;
        line.append(cell);
      }
      body.append(line);
    }
    for (const head of root.querySelectorAll("th[data-key]")) {
      head.setAttribute("aria-sort", head.dataset.key !== sorted.key ? "none" : sorted.down ? "descending" : "ascending");
    }
  }

  function show() {
    const picked = best();
    scatter(picked);
    widths(picked);
    table(picked);
    const title = data.kinds.find((entry) => entry.key === kind).title;
    byId("explorer-budget-text").textContent = Number.isFinite(budget) ? "at most " + short(budget) + " " + title : "no limit";
    const costs = picked === null ? "" : data.kinds.map((each) => short(picked.costs[each.key]) + " " + each.title).join(", ");
    byId("explorer-pick").textContent =
      picked === null ? "Nothing fits." : "Number " + picked.number + ": " + percent(picked.score) + " " + data.metric + " on validation data; " + costs + ".";
    byId("explorer-command").textContent = picked === null ? "" : data.command.replace("NUMBER", picked.number);
  }

  function setBudget(value) {
    budget = value;
    const costs = data.finalists.map(cost);
    const [low, high] = [Math.min(...costs), Math.max(...costs)];
    byId("explorer-budget").value = String(Math.round((1000 * (value - low)) / (high - low || 1)));
    show();
  }

  byId("explorer-budget").addEventListener("input", (event) => {
    const costs = data.finalists.map(cost);
    const [low, high] = [Math.min(...costs), Math.max(...costs)];
    budget = low + ((high - low) * Number(event.target.value)) / 1000;
    show();
  });
  for (const choice of root.querySelectorAll("input[name=explorer-kind]")) {
    choice.addEventListener("change", () => {
      kind = choice.value;
      const costs = data.finalists.map(cost);
      setBudget(Math.max(...costs));
    });
  }
  for (const head of root.querySelectorAll("th[data-key] button")) {
    head.addEventListener("click", () => {
      const key = head.parentElement.dataset.key;
      sorted = { key, down: sorted.key === key ? !sorted.down : key === "score" };
      show();
    });
  }
  byId("explorer-copy").addEventListener("click", async () => {
    const text = byId("explorer-command").textContent;
    try {
      await navigator.clipboard.writeText(text);
      byId("explorer-copy").textContent = "copied";
    } catch {
      getSelection().selectAllChildren(byId("explorer-command"));
    }
  });
  setBudget(Math.max(...data.finalists.map(cost)));
})();
