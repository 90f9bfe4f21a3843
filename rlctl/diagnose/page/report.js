"use strict";
// What logs say reaches the page through textContent, and the plots with its markup escaped.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const PALETTE = ["#0f7fc4", "#e08a00", "#0a9e78", "#c46aa0", "#8d6fd1", "#d5551a", "#6f7f00", "#7a7a7a"];
  const colour = (run) => PALETTE[run % PALETTE.length];
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const state = { log: false, range: null, x: "step", smooth: 0, severities: new Set(), runs: new Set(data.runs.keys()) };
  const figures = new Map(); // metric → its figure, for those that are shown

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

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

  const traces = (metric) => [...state.runs].sort((a, b) => a - b).flatMap((run) => {
    const [steps, y] = data.runs[run].series[metric];
    const curve = {
      x: steps.map((step) => place(run, step)), y, type: "scatter", mode: y.length < 40 ? "lines+markers" : "lines",
      name: plain(data.runs[run].name), line: { color: colour(run), width: 1.6 }, marker: { size: 4 },
      hoverlabel: { namelength: 30 },
    };
    if (!state.smooth) return [curve];
    return [{ ...curve, opacity: 0.25, hoverinfo: "skip" }, { ...curve, y: smoothed(y), mode: "lines" }];
  });

  // Findings as bands over their steps, each with its rule's name; where two runs part, a dashed line.
  const marks = (metric) => {
    const shapes = [];
    const annotations = [];
    const label = (x, text, color) => annotations.push({
      x, y: 1, xref: "x", yref: "paper", xanchor: "left", yanchor: "bottom", yshift: 14 * annotations.length,
      text, showarrow: false, font: { size: 11, color },
    });
    for (const run of state.runs) {
      for (const band of data.runs[run].bands[metric]) {
        if (state.severities.size && !state.severities.has(band.severity)) continue;
        const color = variable(`--${band.severity}`);
        shapes.push({
          type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1,
          x0: place(run, band.first - 0.5), x1: place(run, band.last + 0.5),
          fillcolor: color, opacity: 0.13, line: { width: 0 }, layer: "below",
        });
        label(place(run, band.first), plain(band.rule), color);
      }
    }
    return { shapes, annotations };
  };

  const layout = (metric) => {
    const axis = { gridcolor: variable("--line"), zerolinecolor: variable("--line"), automargin: true };
    const found = marks(metric);
    return {
      ...found, showlegend: false, hovermode: "x unified", dragmode: "zoom",
      margin: { l: 50, r: 10, t: 30 + 14 * found.annotations.length, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: variable("--text"), size: 12 },
      hoverlabel: { bgcolor: variable("--card"), font: { color: variable("--text") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("--dim"), activecolor: variable("--text") },
      xaxis: { ...axis, hoverformat: ".5~g", ...(state.range ? { range: [...state.range] } : {}) },
      yaxis: { ...axis, type: state.log ? "log" : "linear", hoverformat: ".4g", exponentformat: "e" },
    };
  };
  // The buttons are named, because the library's own set holds one that sends the plot to a server.
  const CONFIG = {
    displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d"]],
  };

  const draw = (metric) => Plotly.react(figures.get(metric).lastChild, traces(metric), layout(metric), CONFIG);
  const drawAll = () => [...figures.keys()].forEach(draw);

  // All plots show the same steps.
  const follow = (metric, change) => {
    const reset = change["xaxis.autorange"];
    const range = change["xaxis.range"] || (change["xaxis.range[0]"] !== undefined
      ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null);
    if (!reset && !range) return;
    if (String(range) === String(state.range)) return;
    state.range = range;
    for (const other of figures.keys()) if (other !== metric) draw(other);
  };

  const show = (metric) => {
    if (figures.has(metric)) return;
    const { name, unit, definition } = data.metrics[metric];
    const figure = element("figure");
    figure.tabIndex = -1;
    const caption = element("figcaption");
    caption.append(element("b", "", name), element("span", "dim", unit), element("small", "", definition));
    figure.append(caption, element("div", "plot"));
    const next = [...figures.keys()].filter((other) => other > metric).sort((a, b) => a - b)[0];
    byId("plots").insertBefore(figure, next === undefined ? null : figures.get(next));
    figures.set(metric, figure);
    draw(metric);
    figure.lastChild.on("plotly_relayout", (change) => follow(metric, change));
  };
  const hide = (metric) => {
    if (!figures.has(metric)) return;
    Plotly.purge(figures.get(metric).lastChild);
    figures.get(metric).remove();
    figures.delete(metric);
  };

  const boxes = data.metrics.map((metric, place) => {
    const label = element("label");
    const box = element("input");
    box.type = "checkbox";
    box.addEventListener("change", () => choose(place, box.checked));
    label.append(box, element("span", "", metric.name));
    byId("metrics").append(label);
    return { label, box };
  });
  const choose = (metric, wanted) => {
    boxes[metric].box.checked = wanted;
    (wanted ? show : hide)(metric);
    document.querySelector("#choose summary b").textContent = `${figures.size} of ${boxes.length}`;
  };
  const found = () => boxes.map((_, place) => place).filter((place) => !boxes[place].label.hidden);
  byId("search").addEventListener("input", () => {
    const words = byId("search").value.toLowerCase();
    boxes.forEach(({ label }, place) => {
      label.hidden = !data.metrics[place].name.toLowerCase().includes(words);
    });
  });
  byId("all").addEventListener("click", () => found().forEach((place) => choose(place, true)));
  byId("none").addEventListener("click", () => found().forEach((place) => choose(place, false)));

  const call = (metric) => {
    choose(metric, true);
    all("figure.called").forEach((figure) => figure.classList.remove("called"));
    const figure = figures.get(metric);
    figure.classList.add("called");
    figure.scrollIntoView({ block: "start" });
    figure.focus({ preventScroll: true });
  };
  all("[data-plot]").forEach((button) =>
    button.addEventListener("click", () => call(Number(button.dataset.plot))));

  all("[data-severity]").forEach((chip) => {
    const count = all(`[data-of=${chip.dataset.severity}]`).length;
    chip.querySelector("b").textContent = count;
    chip.disabled = count === 0;
    chip.addEventListener("click", () => {
      const pressed = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", pressed);
      state.severities[pressed ? "add" : "delete"](chip.dataset.severity);
      all("[data-of]").forEach((finding) => {
        finding.hidden = state.severities.size > 0 && !state.severities.has(finding.dataset.of);
      });
      drawAll();
    });
  });

  all("[data-run]").forEach((swatch) => { swatch.style.background = colour(Number(swatch.dataset.run)); });
  if (data.runs.length > 1) {
    data.runs.forEach(({ name }, run) => {
      const chip = element("button", "", name);
      chip.type = "button";
      chip.title = name;
      chip.style.color = colour(run);
      chip.setAttribute("aria-pressed", true);
      chip.addEventListener("click", () => {
        const pressed = chip.getAttribute("aria-pressed") !== "true";
        chip.setAttribute("aria-pressed", pressed);
        state.runs[pressed ? "add" : "delete"](run);
        drawAll();
      });
      byId("runs").append(chip);
    });
  }

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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("keydown", (event) => { if (event.key === "Escape") byId("choose").open = false; });

  data.metrics.forEach((metric, place) => { if (metric.shown) choose(place, true); });
})();
