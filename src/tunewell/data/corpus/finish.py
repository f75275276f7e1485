"""The second half of a build, once every document is known: judge lengths, mix, pack, write, and sum up."""

import json

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import refuse_full_disk, stable_json, sync_tree
from tunewell.core.units import count
from tunewell.data.corpus.assembly import DROPPED, Assembly, Documents
from tunewell.data.corpus.output import Space
from tunewell.data.corpus.packing import (
    ContextChoice,
    Mix,
    Units,
    choose_context,
    mix_sources,
    pack,
    repeat,
    split_long,
    whole_units,
    without_unlearned,
)
from tunewell.data.corpus.spec import NO_SHARE, BuildSpec
from tunewell.data.corpus.summary import Written, all_dropped, data_card, describe_file, summarise
from tunewell.data.corpus.writer import write_split
from tunewell.records.manifest import Manifest, write_manifest

_NUM_NAMED = 5


class Finish:
    """Turns gathered documents into the files of a corpus, in `assembly.folder / "corpus"`."""

    def __init__(self, order: BuildSpec, assembly: Assembly, documents: Documents, space: Space) -> None:
        self._order = order
        self._assembly = assembly
        self._documents = documents
        self._space = space
        self._corpus = assembly.folder / "corpus"
        self._is_dropped = np.zeros(len(documents), dtype=bool)

    def run(self) -> Manifest:
        """Write everything, the manifest last; raise UserError when no document is left or one is too long."""
        documents, order = self._documents, self._order
        self._refuse_nothing()
        context = choose_context(self._longest(), order.context_length, order.context_limit)
        self._judge_long(context)
        self._refuse_nothing()
        mix = self._mix()
        members = {"train": ~documents.is_held_out, "held_out": documents.is_held_out}
        self._refuse_useless_held_out()
        units = {name: self._units(is_member, context, mix, name) for name, is_member in members.items()}
        self._space.tokens = sum(int(some.length.sum(dtype=np.int64)) for some in units.values())
        refuse_full_disk(self._corpus, self._space.shard_bytes())
        splits = {name: self._write(name, some, context) for name, some in units.items() if len(some)}
        self._assembly.close()
        (self._assembly.folder / DROPPED).rename(self._corpus / DROPPED)
        (self._corpus / "dataset_dict.json").write_text(stable_json({"splits": list(splits)}), encoding="utf-8")
        order.save_tokenizer(self._corpus / "tokenizer")
        return self._conclude(splits, context, mix)

    def _longest(self) -> int:
        """Tell the longest document that is kept: one that the policy drops must not lengthen every sequence."""
        lengths, limit = self._documents.lengths, self._order.context_limit
        if self._order.long_documents == "drop" and limit is not None and (lengths <= limit).any():
            lengths = lengths[lengths <= limit]
        return int(lengths.max())

    def _refuse_useless_held_out(self) -> None:
        """Stop when a held-out file was named and none of its rows can be used: nobody wants that silently."""
        files = [index for index, job in enumerate(self._order.jobs) if job.is_held_out]
        sources = [self._assembly.sources[index] for index in files]
        if files and not any(source.held_out for source in sources):
            reasons = ", ".join(
                f"{number:,} {reason}" for source in sources for reason, number in source.dropped.items()
            )
            raise UserError(
                "no row of the held-out file can be used",
                where=f"{sources[0].name}: {reasons or 'no row was read'}",
                fix="it is read like the first source (`columns`, `map`, `format`): give it the same shape",
            )

    def _units(self, is_member: np.ndarray, context: ContextChoice, mix: Mix | None, name: str) -> Units:
        units = whole_units(np.flatnonzero(is_member & ~self._is_dropped), self._documents.lengths)
        units = split_long(units, context.value)
        if units.num_pieces:
            units = without_unlearned(units, self._documents)
        return repeat(units, mix.copies[units.document]) if mix and name == "train" else units

    def _write(self, name: str, units: Units, context: ContextChoice) -> Written:
        packing = pack(units.length, context.value)

        facts = write_split(
            self._corpus / name, units=units, packing=packing, documents=self._documents, progress=self._order.progress
        )
        return units, packing, facts

    def _refuse_nothing(self) -> None:
        if not (self._documents.is_held_out | self._is_dropped).all():
            return
        rows = sum(source.rows for source in self._assembly.sources)
        dropped = all_dropped(self._assembly).most_common()
        reasons = [f"{number:,} {reason}" for reason, number in dropped]
        if held_out := int((self._documents.is_held_out & ~self._is_dropped).sum()):
            reasons.append(f"{held_out:,} held out")
        self._assembly.close()
        with (self._assembly.folder / DROPPED).open(encoding="utf-8") as lines:
            first = lines.readline()
        where = ", ".join(reasons) or "no row was read"
        if first:
            row = json.loads(first)
            where += f"; first: {row['source']} row {row['row']}: {row.get('detail') or row['reason']}"
        raise UserError(
            f"nothing is left to train on: {count(rows, 'row')} came in and no document came out",
            where=where,
            fix="the files are empty or hold blank lines only"
            if not rows
            else "look at the first rows with `tunewell inspect DATA --model MODEL`; "
            "`tunewell glossary REASON` explains a reason",
        )

    def _judge_long(self, context: ContextChoice) -> None:
        documents, policy = self._documents, self._order.long_documents
        too_long = np.flatnonzero(documents.lengths > context.value)
        if not len(too_long) or policy == "split":
            return
        if policy == "error":
            named = [f"{self._place(i)} ({documents.lengths[i]:,} tokens)" for i in too_long[:_NUM_NAMED].tolist()]
            more = f" and {len(too_long) - _NUM_NAMED:,} more" if len(too_long) > _NUM_NAMED else ""
            is_model_limit = self._order.context_limit is not None and context.value >= self._order.context_limit
            longest = int(documents.lengths.max())
            raise_length = "" if is_model_limit else f"set `packing.context_length` to at least {longest:,}, or "
            are = "documents are" if len(too_long) > 1 else "document is"
            raise UserError(
                f"{len(too_long):,} {are} longer than the {context.value:,} tokens of a sequence",
                where=", ".join(named) + more,
                fix=f"{raise_length}set `packing.long_documents` to `split` or `drop`",
            )
        for index in too_long.tolist():
            self._drop(index, "too_long", f"{documents.lengths[index]:,} tokens, a sequence holds {context.value:,}")

    def _place(self, index: int) -> str:
        return f"{self._assembly.sources[self._documents.source[index]].name} row {self._documents.row[index]}"

    def _drop(self, index: int, reason: str, detail: str = "") -> None:
        ledger = self._assembly.sources[self._documents.source[index]]
        if self._documents.is_held_out[index]:
            ledger.held_out -= 1
        else:
            ledger.documents -= 1
        self._assembly.drop(ledger, int(self._documents.row[index]), reason, detail)
        self._is_dropped[index] = True

    def _mix(self) -> Mix | None:
        order, documents = self._order, self._documents
        if not order.shares:
            return None
        groups = [job.source_index if job.source_index in order.shares else NO_SHARE for job in order.jobs]
        group = np.asarray(groups, dtype=np.int32)[documents.source]
        is_open = ~documents.is_held_out & ~self._is_dropped
        open_group = np.where(is_open, group, -1).astype(np.int32)
        mix = mix_sources(open_group, documents.order_key, order.shares, order.max_repeats)
        for index in np.flatnonzero(is_open & (mix.copies == 0)).tolist():
            self._drop(index, "not_sampled")
        return mix

    def _conclude(self, splits: dict[str, Written], context: ContextChoice, mix: Mix | None) -> Manifest:
        is_trained = ~self._documents.is_held_out & ~self._is_dropped
        boundary = np.where(is_trained, self._documents.boundary, 0)
        paths = sorted(path for path in self._corpus.rglob("*") if path.is_file())
        known = {f"{name}/{shard.file}": shard for name, (_, _, facts) in splits.items() for shard in facts.shards}
        names = {path.relative_to(self._corpus).as_posix(): path for path in paths}
        files = {name: describe_file(path, known.get(name)) for name, path in names.items()}
        manifest = summarise(
            self._order,
            self._assembly,
            splits=splits,
            lengths=self._documents.lengths[is_trained],
            boundary_tokens=int((boundary * mix.copies if mix else boundary).sum(dtype=np.int64)),
            context=context,
            mix=mix,
            files=files,
        )
        card = self._corpus / "README.md"
        card.write_text(data_card(manifest), encoding="utf-8")
        manifest = manifest.model_copy(update={"files": {**files, card.name: describe_file(card)}})
        sync_tree(self._corpus)
        write_manifest(self._corpus, manifest)
        return manifest
