"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

  const themed = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: read("--grid"), zerolinecolor: read("--grid"), linecolor: read("--line"), spikecolor: read("--soft") };
    const hover = { bgcolor: read("--card"), bordercolor: read("--line"), font: { color: read("--text") } };
    return { font: read("--text"), axis, hover };
  };

  const layoutOf = (figure) => {
    const theme = themed();
    const layout = structuredClone(figure.layout);
    const family = getComputedStyle(document.body).fontFamily;
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 13, color: theme.font }, hoverlabel: theme.hover, autosize: true,
    });
    for (const name of ["xaxis", "yaxis", "yaxis2"]) {
      if (layout[name]) layout[name] = { ...theme.axis, ...layout[name] };
    }
    return layout;
  };

  const drawAll = () => {
    for (const [name, figure] of Object.entries(figures)) {
      const place = document.getElementById(name);
      Plotly.react(place, place.data || figure.data, layoutOf(figure), config);
    }
  };

  const setTheme = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; drawAll(); };

  const press = (button) => {
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
  };

  for (const button of document.querySelectorAll("[data-menu]")) {
    button.addEventListener("click", () => {
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
})();
