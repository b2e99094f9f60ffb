// Draw the page's figures in the colors of its theme, and again when the theme changes.
"use strict";

function inTheme(layout) {
  const dark = document.documentElement.dataset.theme === "dark";
  const [ink, lines] = dark ? ["#ced6dd", "#48566b"] : ["#323232", "#d1d5da"];
  // A finger that moves over a plot scrolls the page; a mouse selects a part to enlarge.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const themed = { ...layout, dragmode, font: { ...layout.font, color: ink } };
  for (const axis of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
    themed[axis] = { ...layout[axis], gridcolor: lines, linecolor: lines, zerolinecolor: lines };
  }
  return themed;
}

function draw() {
  for (const figure of document.querySelectorAll(".record-plot")) {
    const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
    const options = { responsive: true, displaylogo: false, displayModeBar: false };
    Plotly.react(figure.querySelector("div"), data, inTheme(layout), options);
  }
}

document.addEventListener("DOMContentLoaded", () => {
  draw();
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
});
