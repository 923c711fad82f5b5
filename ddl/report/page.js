"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon"];
  const shown = data.runs.map(() => true);
  const drawn = new Map();  // number of each chart in the page -> its element
  let x = "step", log = false;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (run) => css(`--run-${data.runs[run].color % 8}`);
  // Plotly reads names as markup.
  const literal = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text) => text.length > 26 ? `${text.slice(0, 16)}…${text.slice(-9)}` : text;

  // A point between two gaps has no line.
  const alone = (values) => values.some((value, i) =>
    value !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);

  function traces(chart) {
    return chart.curves.map((curve) => ({
      x: curve[x], y: curve.value, type: "scatter",
      name: literal(data.runs.length > 1 ? `${short(data.runs[curve.run].name)} · ${curve.split}` : curve.split),
      mode: curve.value.length <= 40 || alone(curve.value) ? "lines+markers" : "lines",
      visible: shown[curve.run],
      opacity: curve.split === "train" ? 0.7 : 1,
      line: { color: color(curve.run), width: curve.split === "train" ? 1.2 : 2.2,
              dash: curve.split === "train" && curve.value.length <= 200 ? "dot" : "solid" },
      marker: { symbol: symbols[(data.runs[curve.run].color + Math.floor(data.runs[curve.run].color / 8)) % 8], size: 5 },
    }));
  }

  function layout(chart) {
    const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"),
                   automargin: true, minexponent: 4 };
    const values = chart.curves.flatMap((curve) => curve.value).filter((value) => value !== null);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    // Else the axis of a constant would show digits that it does not have.
    const margin = Math.abs(low) / 2 || 1;
    const fixed = low === high && !log ? { range: [low - margin, low + margin], autorange: false } : { autorange: true };
    // A restart is known by its step alone.
    const starts = x !== "step" ? [] : data.runs.flatMap((run, number) =>
      shown[number] ? run.restarts.map((step) => ({ number, step })) : []);
    return {
      margin: { l: 12, r: 12, t: 28, b: 12 }, showlegend: false, hovermode: "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") },
      font: { family: "system-ui, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif", size: 12, color: css("--soft") },
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), namelength: 60,
                    font: { color: css("--ink"), size: 12 } },
      xaxis: { ...axis, title: { text: x, standoff: 6 }, zeroline: false },
      // A curve without a positive value has no place on a logarithmic axis.
      yaxis: { ...axis, zeroline: !log, type: log && high > 0 ? "log" : "linear",
               exponentformat: high >= 1000 && high < 1e12 ? "SI" : "power", hoverformat: ".6~g",
               ...fixed },
      shapes: starts.map(({ number, step }) => ({
        type: "line", x0: step, x1: step, y0: 0, y1: 1, yref: "paper",
        line: { color: color(number), width: 1, dash: "dash" }, opacity: 0.6 })),
    };
  }

  function draw(element) {
    const chart = data.charts[Number(element.dataset.chart)];
    drawn.set(chart, element);
    Plotly.react(element, traces(chart), layout(chart), {
      responsive: true, displaylogo: false, scrollZoom: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
      toImageButtonOptions: { filename: chart.name.replace(/[^\w.-]+/g, "_") } });
  }

  const redraw = () => drawn.forEach((element) => draw(element));
  const elements = [...document.querySelectorAll(".chart")];
  // Charts are drawn when they come near the screen: many of them take seconds.
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }), { rootMargin: "600px" });
  elements.forEach((element) => watcher.observe(element));
  addEventListener("beforeprint", () => elements.forEach(draw));
  dark.addEventListener("change", redraw);

  document.querySelectorAll("input[data-run]").forEach((box) => {
    box.addEventListener("change", () => { shown[Number(box.dataset.run)] = box.checked; redraw(); });
  });
  document.querySelectorAll("input[name=x]").forEach((button) => {
    button.addEventListener("change", () => { x = button.value; redraw(); });
  });
  const logBox = document.getElementById("log");
  if (logBox) logBox.addEventListener("change", () => { log = logBox.checked; redraw(); });
})();
