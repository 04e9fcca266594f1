// draw the charts that are unfolded, and the others when they are; open the section of a link
function draw() {
  for (const box of document.querySelectorAll(".plot:empty")) {
    if (!box.offsetWidth) continue; // folded: it has no width yet
    const spec = JSON.parse(box.nextElementSibling.textContent);
    // a chart zooms, not the page
    box.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) event.preventDefault(); }, {passive: false});
    box.append(document.createElement("div"));
    vegaEmbed(box.firstChild, spec, {mode: "vega-lite", ast: true, actions: false, renderer: "svg"});
  }
}
function unfold() {
  const section = location.hash && document.getElementById(location.hash.slice(1));
  const folded = section && section.querySelector("details.section");
  if (folded) { folded.open = true; section.scrollIntoView(); }
}
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => document.querySelectorAll("details.section").forEach((each) => { each.open = true; }));
document.addEventListener("toggle", draw, true);
unfold();
draw();
