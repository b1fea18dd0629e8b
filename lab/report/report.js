// Draws the figures that the page carries as JSON, in the colors of the reader's scheme, again when that changes.
const darkColors = JSON.parse(document.getElementById("dark-colors").textContent);
const scheme = matchMedia("(prefers-color-scheme: dark)");
const lightColors = new RegExp(Object.keys(darkColors).join("|"), "g");

function draw() {
  for (const div of document.querySelectorAll(".plot")) {
    const text = document.getElementById(div.dataset.figure).textContent;
    const figure = JSON.parse(scheme.matches ? text.replace(lightColors, (color) => darkColors[color]) : text);
    Plotly.react(div, figure.data, figure.layout, { displayModeBar: false, responsive: true });
  }
}

scheme.addEventListener("change", draw);
draw();
