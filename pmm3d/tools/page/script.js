"use strict";
for (const chart of document.querySelectorAll("svg[data-hover]")) {
  const series = JSON.parse(chart.dataset.hover).filter((one) => one.points.length);
  const cursor = document.createElementNS(chart.namespaceURI, "line");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", 24);
  cursor.setAttribute("y2", 196);
  chart.parentElement.append(tip);
  const show = (event) => {
    const box = chart.getBoundingClientRect(), figure = chart.parentElement.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const near = (points) => points.reduce((one, other) => Math.abs(other[2] - x) < Math.abs(one[2] - x) ? other : one);
    const found = series.map((one) => [one.name, near(one.points)]);
    const first = found.reduce((one, other) => Math.abs(other[1][2] - x) < Math.abs(one[1][2] - x) ? other : one)[1];
    cursor.setAttribute("x1", first[2]);
    cursor.setAttribute("x2", first[2]);
    chart.append(cursor);
    const said = found.filter((one) => one[1][0] === first[0])
      .map((one) => series.length > 1 ? one[0] + " " + one[1][1] : one[1][1]);
    tip.textContent = "step " + first[0] + ": " + said.join(", ");
    tip.hidden = false;
    const left = box.left - figure.left + first[2] / chart.viewBox.baseVal.width * box.width;
    tip.style.left = Math.max(0, Math.min(left + 8, figure.width - tip.offsetWidth)) + "px";
    tip.style.top = box.top - figure.top + 4 + "px";
  };
  chart.addEventListener("pointermove", show);
  chart.addEventListener("pointerleave", () => { tip.hidden = true; cursor.remove(); });
}
document.documentElement.dataset.script = "ran";
