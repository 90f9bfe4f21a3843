"use strict";
// Draws curves as SVG. What logs say reaches the page through textContent and attributes, never as markup.
// `kept` is what an earlier call returned, for a page whose content was replaced by a newer one.
const startPage = (kept = { state: {}, chosen: [] }) => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const PALETTE = 8; // number of colours of runs, in report.css
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const state = { log: false, range: null, x: "step", smooth: 0, severities: new Set(), runs: new Set(data.runs.keys()), ...kept.state };
  const figures = new Map(); // metric → its figure, for those that are shown

  const longest = Math.max(...data.runs.map(({ seconds }) => seconds[1].at(-1) ?? 0));
  const [unit, unitSeconds] = longest > 7200 ? ["hours", 3600] : ["minutes", 60];
  // Where a step of a run is on the x axis. Times between two logged steps are interpolated.
  const place = (run, step) => {
    const { batch, seconds: [steps, seconds] } = data.runs[run];
    if (state.x === "samples") return step * batch;
    if (state.x !== "time") return step;
    const after = steps.findIndex((one) => one >= step);
    if (after < 1) return (after === 0 ? seconds[0] : seconds.at(-1)) / unitSeconds;
    const share = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
    return (seconds[after - 1] + share * (seconds[after] - seconds[after - 1])) / unitSeconds;
  };
  // Exponential moving average without the bias of the first values.
  const smoothed = (values) => {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      sum = state.smooth * sum + value;
      weight = state.smooth * weight + 1;
      return sum / weight;
    });
  };

  // The curves of a metric: values as drawn, those as logged where they are smoothed, and what is logged.
  const curves = (metric) => [...state.runs].sort((a, b) => a - b).map((run) => {
    const [steps, logged] = data.runs[run].series[metric];
    return { run, x: steps.map((step) => place(run, step)), logged, y: state.smooth ? smoothed(logged) : logged };
  });
  const bands = (metric) => [...state.runs].flatMap((run) => data.runs[run].bands[metric]
    .filter(({ severity }) => !state.severities.size || state.severities.has(severity))
    .map((band) => ({ ...band, from: place(run, band.first - 0.5), to: place(run, band.last + 0.5) })));

  const svgElement = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const shown = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e6 || size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
  };
  // Multiples of 1, 2 or 5 times a power of ten within an interval, about `count` of them.
  const ticks = (low, high, count) => {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
    const first = Math.ceil(low / step - 1e-9);
    const number = Math.floor(high / step + 1e-9) - first + 1;
    return [...Array(Math.max(0, number)).keys()].map((index) => Number(((first + index) * step).toPrecision(12)));
  };
  const powers = (low, high) => {
    const made = [];
    const every = Math.max(1, Math.ceil((high - low) / 5));
    for (let power = Math.ceil(low); power <= high; power += every) made.push(power);
    return made.length > 1 ? made : ticks(low, high, 4);
  };
  const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  // An interval around the values, also where they are equal or there are none.
  const padded = ([low, high], share) => {
    if (low > high) return [0, 1];
    const pad = high > low ? share * (high - low) : Math.abs(low) * 0.1 || 1;
    return [low - pad, high + pad];
  };

  const HEIGHT = 210;
  const MARGIN = { left: 56, right: 12, bottom: 24 };
  const scales = new Map(); // metric → the x axis of its plot, for the pointer

  const draw = (metric) => {
    const box = figures.get(metric).querySelector(".plot");
    const width = Math.max(160, box.clientWidth || 480);
    const drawn = curves(metric);
    const marked = bands(metric);
    const top = 8 + 14 * marked.length;
    const height = HEIGHT + 14 * marked.length;
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const toY = (value) => (state.log ? (value > 0 ? Math.log10(value) : NaN) : value);
    const [x0, x1] = state.range ?? padded(extent(drawn.flatMap(({ x }) => x)), 0.01);
    const inside = drawn.flatMap(({ x, y, logged }) => [y, logged].flatMap((values) =>
      values.filter((_, index) => x[index] >= x0 && x[index] <= x1).map(toY).filter(Number.isFinite)));
    const [y0, y1] = padded(extent(inside), 0.06);
    const px = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * (right - MARGIN.left);
    const py = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
    scales.set(metric, { x0, x1, left: MARGIN.left, right, top, bottom, drawn, px });

    const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": data.metrics[metric].title });
    const clip = svgElement("clipPath", { id: `clip${metric}` });
    clip.append(svgElement("rect", { x: MARGIN.left, y: top - 4, width: right - MARGIN.left, height: bottom - top + 8 }));
    svg.append(clip);
    (state.log ? powers(y0, y1) : ticks(y0, y1, 4)).forEach((value) => {
      const label = shown(state.log ? 10 ** value : value);
      svg.append(svgElement("line", { class: "grid", x1: MARGIN.left, x2: right, y1: py(value), y2: py(value) }));
      svg.append(svgElement("text", { class: "tick", x: MARGIN.left - 6, y: py(value) + 4, "text-anchor": "end" }, label));
    });
    const isWhole = state.x !== "time";
    ticks(x0, x1, Math.max(2, Math.min(8, width / 90))).filter((value) => !isWhole || Number.isInteger(value)).forEach((value) => {
      svg.append(svgElement("line", { class: "grid", x1: px(value), x2: px(value), y1: top, y2: bottom }));
      svg.append(svgElement("text", { class: "tick", x: px(value), y: height - 6, "text-anchor": "middle" }, value.toLocaleString("en")));
    });
    const body = svgElement("g", { "clip-path": `url(#clip${metric})` });
    svg.append(body);
    marked.forEach(({ rule, severity, from, to }, index) => {
      body.append(svgElement("rect", { class: `band ${severity}`, x: px(from), y: top, width: Math.max(1, px(to) - px(from)), height: bottom - top }));
      const at = Math.min(Math.max(px(from), MARGIN.left), right - 7 * rule.length);
      svg.append(svgElement("text", { class: `band-label ${severity}`, x: at, y: 12 + 14 * index }, rule));
    });
    const path = (x, values) => {
      let isOpen = false;
      return values.map((value, index) => {
        const y = toY(value);
        const command = isOpen ? "L" : "M";
        isOpen = Number.isFinite(y);
        return isOpen ? `${command}${px(x[index]).toFixed(1)} ${py(y).toFixed(1)}` : "";
      }).join("");
    };
    drawn.forEach(({ run, x, y, logged }) => {
      if (state.smooth) body.append(svgElement("path", { class: `logged run${run % PALETTE}`, d: path(x, logged) }));
      body.append(svgElement("path", { class: `curve run${run % PALETTE}`, d: path(x, y) }));
      if (y.length < 40) {
        y.forEach((value, index) => {
          if (!Number.isFinite(toY(value))) return;
          body.append(svgElement("circle", { class: `point run${run % PALETTE}`, cx: px(x[index]), cy: py(toY(value)), r: 2.2 }));
        });
      }
    });
    svg.append(svgElement("line", { class: "pointer", y1: top, y2: bottom, visibility: "hidden" }));
    svg.append(svgElement("rect", { class: "zoom", y: top, height: bottom - top, width: 0 }));
    box.replaceChildren(svg);
  };
  const drawAll = () => [...figures.keys()].forEach(draw);

  // The pointer shows values; a drag zooms all plots, a double click shows the whole run.
  const listen = (metric, figure) => {
    const box = figure.querySelector(".plot");
    const readout = figure.querySelector("output");
    const at = (event) => {
      const { x0, x1, left, right } = scales.get(metric);
      const pixel = Math.min(right, Math.max(left, event.clientX - box.getBoundingClientRect().left));
      return { pixel, value: x0 + ((pixel - left) / (right - left)) * (x1 - x0) };
    };
    let start = null;
    const end = () => {
      start = null;
      readout.textContent = "";
      box.querySelector(".pointer")?.setAttribute("visibility", "hidden");
      box.querySelector(".zoom")?.setAttribute("width", 0);
    };
    box.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") start = at(event); });
    box.addEventListener("pointermove", (event) => {
      const { pixel, value } = at(event);
      if (start) {
        const zoom = box.querySelector(".zoom");
        zoom.setAttribute("x", Math.min(start.pixel, pixel));
        zoom.setAttribute("width", Math.abs(pixel - start.pixel));
      }
      const nearest = scales.get(metric).drawn.filter(({ x }) => x.length).map(({ run, x, logged }) => {
        const index = x.reduce((best, one, other) => (Math.abs(one - value) < Math.abs(x[best] - value) ? other : best), 0);
        return { x: x[index], text: `${data.runs.length > 1 ? `${data.runs[run].name} ` : ""}${shown(logged[index])}` };
      });
      if (!nearest.length) return;
      const line = box.querySelector(".pointer");
      const middle = scales.get(metric).px(nearest[0].x);
      ["x1", "x2"].forEach((name) => line.setAttribute(name, middle));
      line.setAttribute("visibility", "visible");
      const where = state.x === "time" ? `${shown(nearest[0].x)} ${unit}` : `${state.x === "step" ? "step" : "sample"} ${nearest[0].x.toLocaleString("en")}`;
      readout.textContent = `${where}: ${nearest.map(({ text }) => text).join(", ")}`;
    });
    box.addEventListener("pointerup", (event) => {
      const from = start;
      end();
      if (!from || Math.abs(at(event).pixel - from.pixel) < 8) return;
      state.range = [from.value, at(event).value].sort((a, b) => a - b);
      drawAll();
    });
    box.addEventListener("pointerleave", end);
    box.addEventListener("dblclick", () => { state.range = null; drawAll(); });
  };

  const widths = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const metric = Number(target.dataset.plotOf);
    if (figures.has(metric)) draw(metric);
  }));

  const show = (metric) => {
    if (figures.has(metric)) return;
    const { key, title, unit: unitOfValues, definition, flat } = data.metrics[metric];
    const figure = element("figure");
    figure.tabIndex = -1;
    figure.dataset.metric = key;
    const caption = element("figcaption");
    caption.append(element("b", "", title), element("span", "dim", unitOfValues === title ? "" : unitOfValues), element("output"));
    const { name } = data.metrics[metric];
    if (definition) {
      const about = element("details");
      about.append(element("summary", "", name), element("small", "", definition));
      caption.append(about);
    } else if (title !== name) caption.append(element("small", "", name));
    const box = element("div", "plot");
    box.dataset.plotOf = metric;
    figure.append(caption, box);
    const parent = byId(flat ? "flat" : "plots");
    const next = [...parent.querySelectorAll(".plot")].find((other) => Number(other.dataset.plotOf) > metric);
    parent.insertBefore(figure, next ? next.closest("figure") : null);
    figures.set(metric, figure);
    draw(metric);
    listen(metric, figure);
    widths.observe(box);
  };
  const hide = (metric) => {
    if (!figures.has(metric)) return;
    widths.unobserve(figures.get(metric).querySelector(".plot"));
    figures.get(metric).remove();
    figures.delete(metric);
  };
  const countFlat = () => {
    const count = [...figures.keys()].filter((metric) => data.metrics[metric].flat).length;
    byId("flat-curves").hidden = count === 0;
    document.querySelector("#flat-curves > summary").textContent = `${count} flat curve${count === 1 ? "" : "s"}`;
  };

  const boxes = data.metrics.map((metric, place) => {
    const label = element("label");
    const box = element("input");
    box.type = "checkbox";
    box.addEventListener("change", () => choose(place, box.checked));
    label.append(box, element("span", "", metric.title === metric.name ? metric.name : `${metric.title} (${metric.name})`));
    byId("metrics").append(label);
    return { label, box };
  });
  const choose = (metric, wanted) => {
    boxes[metric].box.checked = wanted;
    (wanted ? show : hide)(metric);
    countFlat();
    document.querySelector("#choose summary b").textContent = `${figures.size} of ${boxes.length}`;
  };
  const found = () => boxes.map((_, place) => place).filter((place) => !boxes[place].label.hidden);
  byId("search").addEventListener("input", () => {
    const words = byId("search").value.toLowerCase();
    boxes.forEach(({ label }, place) => {
      const { name, title } = data.metrics[place];
      label.hidden = !`${name} ${title}`.toLowerCase().includes(words);
    });
  });
  byId("all").addEventListener("click", () => found().forEach((place) => choose(place, true)));
  byId("none").addEventListener("click", () => found().forEach((place) => choose(place, false)));

  const call = (metric) => {
    choose(metric, true);
    all("figure.called").forEach((figure) => figure.classList.remove("called"));
    const figure = figures.get(metric);
    if (data.metrics[metric].flat) byId("flat-curves").open = true;
    figure.classList.add("called");
    figure.scrollIntoView({ block: "start" });
    figure.focus({ preventScroll: true });
  };
  all("[data-plot]").forEach((button) =>
    button.addEventListener("click", () => call(Number(button.dataset.plot))));

  const hideOthers = () => all("[data-of]").forEach((finding) => {
    finding.hidden = state.severities.size > 0 && !state.severities.has(finding.dataset.of);
  });
  all("[data-severity]").forEach((chip) => {
    const count = all(`[data-of=${chip.dataset.severity}]`).length;
    chip.querySelector("b").textContent = count;
    chip.hidden = count === 0;
    if (count === 0) state.severities.delete(chip.dataset.severity);
    chip.setAttribute("aria-pressed", state.severities.has(chip.dataset.severity));
    chip.addEventListener("click", () => {
      const pressed = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", pressed);
      state.severities[pressed ? "add" : "delete"](chip.dataset.severity);
      hideOthers();
      drawAll();
    });
  });
  hideOthers();

  all("[data-run]").forEach((swatch) => swatch.classList.add(`run${swatch.dataset.run % PALETTE}`));
  if (data.runs.length > 1) {
    data.runs.forEach(({ name }, run) => {
      const chip = element("button", `run${run % PALETTE}`, name);
      chip.type = "button";
      chip.title = name;
      chip.setAttribute("aria-pressed", state.runs.has(run));
      chip.addEventListener("click", () => {
        const pressed = chip.getAttribute("aria-pressed") !== "true";
        chip.setAttribute("aria-pressed", pressed);
        state.runs[pressed ? "add" : "delete"](run);
        drawAll();
      });
      byId("runs").append(chip);
    });
  }

  byId("log").setAttribute("aria-pressed", state.log);
  byId("x").value = state.x;
  byId("smooth").value = state.smooth;
  byId("log").addEventListener("click", () => {
    state.log = !state.log;
    byId("log").setAttribute("aria-pressed", state.log);
    drawAll();
  });
  byId("reset").addEventListener("click", () => { state.range = null; drawAll(); });
  byId("x").querySelector("[value=samples]").disabled = !data.runs.every(({ batch }) => batch);
  const time = byId("x").querySelector("[value=time]");
  time.textContent = unit;
  time.disabled = !data.runs.every(({ seconds }) => seconds[0].length);
  byId("x").addEventListener("change", () => { Object.assign(state, { x: byId("x").value, range: null }); drawAll(); });
  byId("smooth").addEventListener("input", () => { state.smooth = Number(byId("smooth").value); drawAll(); });

  const before = new Map(kept.chosen); // metric → whether its plot was shown
  data.metrics.forEach(({ key, shown: isShown }, place) => { if (before.get(key) ?? isShown) choose(place, true); });
  byId("no-curves").hidden = figures.size > 0;
  return () => ({ state, chosen: data.metrics.map(({ key }, place) => [key, figures.has(place)]) });
};
let keepPage = startPage();
addEventListener("keydown", (event) => { if (event.key === "Escape") document.getElementById("choose").open = false; });
