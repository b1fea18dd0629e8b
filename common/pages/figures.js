// Draws the figures that a page carries as JSON, in the colors of the reader's scheme and as wide as their cards.
const scheme = matchMedia("(prefers-color-scheme: dark)");
// A finger on a figure scrolls the page; a mouse zooms into the figure.
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.isConnected && target.data) Plotly.Plots.resize(target);
});

function drawFigures() {
  const colors = document.getElementById("dark-colors");
  if (!colors) return;
  const darkColors = JSON.parse(colors.textContent);
  const lightColors = new RegExp(Object.keys(darkColors).join("|"), "g");
  for (const div of document.querySelectorAll(".plot")) {
    const text = div.previousElementSibling.textContent;
    const { data, layout } = JSON.parse(scheme.matches ? text.replace(lightColors, (color) => darkColors[color]) : text);
    // In a narrow window each name of the legend has its own line, and a legend gets half of a figure at most.
    const names = data.filter((trace) => trace.name && trace.showlegend !== false).length;
    const room = div.clientWidth < 560 && names > 4 ? 26 * names : 0;
    const height = layout.height + room;
    div.style.height = `${height}px`;
    Plotly.react(div, data, { ...layout, height, dragmode }, { displayModeBar: false });
    widths.observe(div);
  }
}

scheme.addEventListener("change", drawFigures);
drawFigures();
