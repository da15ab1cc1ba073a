"use strict";
(() => {
  let figures = null;  // until they are unpacked
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

  const themed = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: read("--grid"), zerolinecolor: read("--grid"), linecolor: read("--line"), spikecolor: read("--soft") };
    const hover = { bgcolor: read("--card"), bordercolor: read("--line"), font: { color: read("--text") } };
    return { font: read("--text"), axis, hover };
  };

  const NARROW = 480;  // pixels of a chart, below which it gets smaller letters and more height

  const layoutOf = (figure, narrow) => {
    const theme = themed();
    const layout = structuredClone(figure.layout);
    const family = getComputedStyle(document.body).fontFamily;
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: narrow ? 11 : 13, color: theme.font }, hoverlabel: theme.hover, autosize: true,
    });
    for (const name of ["xaxis", "yaxis", "yaxis2"]) {
      if (layout[name]) layout[name] = { ...theme.axis, ...layout[name] };
    }
    if (narrow) {
      const named = figure.data.filter((trace) => trace.name && trace.showlegend !== false).length;
      if (layout.legend) layout.height += 15 * Math.max(0, named - 2);
      layout.margin = { ...layout.margin, l: Math.min(layout.margin.l, 50), r: Math.min(layout.margin.r, 40) };
    }
    return layout;
  };

  const dataOf = (figure, narrow) => {
    const longest = (trace) => Math.max(...trace.x);  // its number has no room behind it
    const placed = (trace) => trace.x.map((length) => (length > longest(trace) / 2 ? "inside" : "outside"));
    const inside = (trace) => (trace.textposition === "outside" ? { ...trace, textposition: placed(trace), textangle: 0 } : trace);
    return narrow ? figure.data.map(inside) : figure.data;
  };

  const unpacked = async (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };

  const drawAll = () => {
    if (figures === null) return;
    for (const [name, figure] of Object.entries(figures)) {
      const place = document.getElementById(name);
      const narrow = place.clientWidth < NARROW;
      Plotly.react(place, place.data || dataOf(figure, narrow), layoutOf(figure, narrow), config);
    }
  };

  const setTheme = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; drawAll(); };

  const press = (button) => {
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
  };

  for (const button of document.querySelectorAll("[data-menu]")) {
    button.addEventListener("click", () => {
      if (figures === null) return;
      press(button);
      const { chart, menu, choice } = button.dataset;
      Plotly.restyle(chart, figures[chart].menus[menu][choice]);
    });
  }
  for (const group of document.querySelectorAll(".menu")) press(group.firstElementChild);

  const valueOf = (row, place) => {
    const number = row.cells[place].querySelector("data");
    return number ? Number(number.value) : row.cells[place].textContent;
  };

  const sortBy = (table, head) => {
    const place = head.cellIndex;
    const down = head.getAttribute("aria-sort") !== "descending";
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [valueOf(a, place), valueOf(b, place)];
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return down ? -order : order;
    });
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
  };

  for (const head of document.querySelectorAll("table.sortable th")) {
    head.tabIndex = 0;
    head.addEventListener("click", () => sortBy(head.closest("table"), head));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") head.click(); });
  }

  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  systemDark.addEventListener("change", (event) => setTheme(event.matches));
  setTheme(systemDark.matches);

  const start = async () => {
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
    figures = JSON.parse(await unpacked("figures"));
    drawAll();
  };
  start().catch((error) => {
    const old = "This browser cannot unpack the charts (that takes Chrome 80, Firefox 113, Safari 16.4 or later).";
    const text = "DecompressionStream" in window ? `The charts cannot be drawn: ${error.message}` : old;
    for (const place of document.querySelectorAll(".chart")) place.textContent = text;
    if ("DecompressionStream" in window) throw error;
  });
})();
