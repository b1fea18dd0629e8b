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
    Plotly.react(div, data, { ...layout, dragmode }, { displayModeBar: false });
    widths.observe(div);
  }
}

scheme.addEventListener("change", drawFigures);
drawFigures();
