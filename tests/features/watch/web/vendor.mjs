// Build the vendored file of the page, and record versions, hashes and licences: `make vendor`.
import { createHash } from 'node:crypto';
import { readFileSync, writeFileSync } from 'node:fs';
import { build } from 'esbuild';

const HERE = new URL('.', import.meta.url).pathname;
const STATIC = new URL('../../../../src/tunewell/features/watch/static/vendor/', import.meta.url).pathname;
const PACKAGES = ['preact', 'htm', '@preact/signals', '@preact/signals-core', 'uplot'];

const read = (name) => readFileSync(HERE + 'node_modules/' + name, 'utf8');
const facts = PACKAGES.map((name) => JSON.parse(read(`${name}/package.json`)));
const banner = `/*! ${facts.map((own) => `${own.name} ${own.version} (${own.license})`).join(', ')}; see LICENSES.txt */`;
await build({
  entryPoints: [HERE + 'vendor_entry.js'],
  outfile: STATIC + 'vendor.js',
  bundle: true,
  minify: true,
  format: 'esm',
  target: 'es2022',
  legalComments: 'none',
  banner: { js: banner },
});
writeFileSync(STATIC + 'uplot.css', `${banner}\n${read('uplot/dist/uPlot.min.css').trim()}\n`);
const licence = (own) => `${own.name} ${own.version}\n${own.homepage ?? ''}\n\n${read(`${own.name}/LICENSE`).trim()}\n`;
writeFileSync(STATIC + 'LICENSES.txt', facts.map(licence).join(`\n${'-'.repeat(80)}\n\n`));

const lock = JSON.parse(readFileSync(HERE + 'package-lock.json', 'utf8')).packages;
const hash = (name) => createHash('sha256').update(readFileSync(STATIC + name)).digest('hex');
const record = {
  packages: facts.map((own) => ({
    name: own.name,
    version: own.version,
    license: own.license,
    integrity: lock[`node_modules/${own.name}`].integrity,
  })),
  built_with: `esbuild ${JSON.parse(read('esbuild/package.json')).version}`,
  sha256: Object.fromEntries(['vendor.js', 'uplot.css', 'LICENSES.txt'].map((name) => [name, hash(name)])),
};
writeFileSync(STATIC + 'vendor.json', JSON.stringify(record, null, 2) + '\n');
