// draw every chart, open the section that a link leads to, and show thumbnails from one picture
const shared = JSON.parse(document.getElementById("shared").textContent);
function draw(box) {
  const spec = JSON.parse(box.nextElementSibling.textContent);
  if (spec.data.name) spec.datasets = {[spec.data.name]: shared[spec.data.name]};
  vegaEmbed(box, spec, {mode: "vega-lite", ast: true, actions: false, renderer: "svg"});
}
// a folded chart has no width: it is drawn when it is first seen
const seen = new IntersectionObserver((entries) => {
  for (const {isIntersecting, target} of entries) {
    if (isIntersecting) { seen.unobserve(target); draw(target); }
  }
}, {rootMargin: "400px"});
document.querySelectorAll(".plot").forEach((box) => seen.observe(box));
function unfold() {
  const section = location.hash && document.getElementById(location.hash.slice(1));
  const folded = section && section.querySelector("details.section");
  if (folded) { folded.open = true; section.scrollIntoView(); }
}
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => document.querySelectorAll("details.section").forEach((each) => { each.open = true; }));
unfold();
