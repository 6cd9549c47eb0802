// Draw every panel; window.drawn is set when all are there, or to the first error.
const options = {
  config: config,
  renderer: "svg",
  actions: {export: {svg: true, png: true}, source: false, compiled: false, editor: false},
  tooltip: {theme: "light"},
};
(async () => {
  for (const [id, spec] of Object.entries(panels)) {
    spec.datasets = {...spec.datasets, [spec.usermeta.rows]: data[spec.usermeta.rows]};
    await vegaEmbed("#" + id, spec, {...options, downloadFileName: id});
  }
})().then(() => { window.drawn = true; }, (error) => { window.drawn = String(error); console.error(error); });
// A folded part is printed unfolded.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
