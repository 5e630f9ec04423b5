// The list of versions stands beside the folders of all of them, so that an old one knows of those that came after it.
document.addEventListener("DOMContentLoaded", async () => {
  const box = document.querySelector(".versions");
  const select = box?.querySelector("select");
  const root = box && new URL(box.dataset.root || "./", location.href);
  if (!select || root.protocol === "file:") return;
  const answer = await fetch(new URL("../versions.json", root)).catch(() => null);
  if (!answer?.ok) return;
  const here = root.pathname.split("/").at(-2);
  select.replaceChildren(...(await answer.json()).map((name) => new Option(name, name, name === here, name === here)));
  select.addEventListener("change", () => {
    const page = location.pathname.slice(root.pathname.length);
    location.assign(new URL(`../${select.value}/${page}`, root));
  });
});
