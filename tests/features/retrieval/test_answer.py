"""Answers from an index: passages that fit, follow-up questions, refusals, and sources that are checked."""

import re
from collections.abc import Generator
from pathlib import Path

import pytest
from toy_index import college_index

from tunewell.core.errors import UserError
from tunewell.data.reading_prompt import NOT_FOUND, Passage, is_refusal, reading_prompt
from tunewell.features.retrieval.answer import PassageFinder, RetrievalChat
from tunewell.features.retrieval.reading import best_sentence, check_claims, unsupported
from tunewell.records.plan import Chosen

DEADLINE = "By when must an application reach Alderhollow College?"


class Scripted:
    """A reader that gives prepared answers and remembers what it got."""

    def __init__(self, *answers: str, max_letters: int = 100_000) -> None:
        self.messages: list[dict[str, str]] = []
        self.sent: list[str] = []
        self._answers, self._max_letters = list(answers), max_letters

    def prompt_for(self, text: str) -> list[int]:
        if len(text) > self._max_letters:
            raise UserError("too long")
        return []

    def reply(self, text: str, *, sent: str | None = None) -> Generator[str, None, None]:
        self.sent.append(sent or text)
        answer = self._answers.pop(0)
        yield from re.findall(r"\S+\s*", answer)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    return college_index(tmp_path_factory.mktemp("index"))


def ask(retrieval: RetrievalChat, question: str):
    return "".join(retrieval.ask(question)), retrieval.answer


def test_an_answer_names_its_sources_with_file_heading_and_lines(retriever):
    retrieval = RetrievalChat(retriever, Scripted("It is 15 January [1]."))
    _, answer = ask(retrieval, DEADLINE)
    [cited] = [source for source in answer.sources if source.is_cited]
    assert cited.file.endswith("pages/alderhollow-college.md") and cited.heading == "Alderhollow College > How to apply"
    assert cited.lines == "lines 14-16" and "15 January" in cited.quote and not answer.warnings
    page = Path(cited.file).read_text().splitlines()[13:16]
    assert "\n".join(page) == cited.text


def test_a_source_that_was_not_shown_and_a_quote_that_is_not_there_are_marked(retriever):
    said = 'See [9]: "applications close on the second of May" and "The application deadline is 15 January" [1].'
    _, answer = ask(RetrievalChat(retriever, Scripted(said)), DEADLINE)
    assert [warning.partition(" is ")[0] for warning in answer.warnings] == [
        "[9]",
        "the quote “applications close on the second of May”",
        "[1] does not say “May”: check this answer",
    ]


def test_a_citation_whose_passage_does_not_hold_the_claim_is_marked():
    """A false answer stood above a source that says nothing of it, without a warning."""
    music = Passage("music.pdf", "Music", (), "The music collection has 3,400 vinyl records.")
    rooms = Passage("rooms.md", "Rooms", (), "The Oak study room has a projector. It opens at 10:00 on Saturday.")
    asked = "Which study room has a projector?"
    assert unsupported("The Birch study room has a projector. [2]", asked, [rooms, music]) == [("[2]", ["Birch"])]
    assert unsupported("The Oak study room has a projector. [1]", asked, [rooms, music]) == []
    assert unsupported("It opens at 9:30 [1], and has 3,400 records [2].", asked, [rooms, music]) == [("[1]", ["9:30"])]
    assert unsupported("Yes. Most people like it [1, 2].", asked, [rooms, music]) == []


def test_several_sources_in_one_bracket_are_checked_too():
    passages = [Passage("a.md", "A", (), "One."), Passage("b.md", "B", (), "Two.")]
    found = check_claims("Both say so [1, 2], and [2; 9] too.", passages)
    assert found.cited == (1, 2) and found.unknown == (9,)


def test_passages_that_do_not_fit_are_left_out_and_counted(retriever):
    reader = Scripted("yes", max_letters=1200)
    _, answer = ask(RetrievalChat(retriever, reader), DEADLINE)
    assert answer.num_left_out == 5 - len(answer.sources) > 0 and len(reader.sent[0]) <= 1200
    with pytest.raises(UserError, match="no passage fits in the model's context"):
        ask(RetrievalChat(retriever, Scripted("no", max_letters=50)), DEADLINE)


def test_a_follow_up_question_finds_its_passages_by_the_question_before(retriever):
    reader = Scripted("15 January", "31,400", "?")
    retrieval = RetrievalChat(retriever, reader, num_passages=4)
    ask(retrieval, DEADLINE)
    _, answer = ask(retrieval, "And the costs?")
    assert any(source.heading == "Alderhollow College > Costs" for source in answer.sources)
    assert all(
        source.heading != "Alderhollow College > Costs" for source in RetrievalChat(retriever, reader).answer.sources
    )
    assert [turn["content"] for turn in reader.messages[::2]] == [DEADLINE, "And the costs?"], (
        "history without passages"
    )


def test_a_chain_of_follow_up_questions_keeps_its_subject(retriever):
    """The third question was searched with the second one only, "And the costs?", and found pages of all colleges."""
    finder = PassageFinder(retriever, num_passages=3)
    earlier = [DEADLINE, "And the costs?", "How much is it for each year?"]
    for question in ("And the deadline?", "What is it known for in the region?"):
        found, _ = finder.find(question, earlier)
        assert found[0].passage.title == "Alderhollow College", question
    found, _ = finder.find("What does it cost?", [*earlier, "And at Ottervane University?"])
    assert found[0].passage.title == "Ottervane University", "the last subject that was named"


def test_an_unrelated_question_after_an_answered_one_is_refused(refusing):
    """Together with the question before, every question seemed to be answered by the documents."""
    finder, answered = PassageFinder(refusing), "What is the application deadline of Alderhollow College?"
    assert finder.find(answered)[1]
    assert not finder.find("Who discovered penicillin in London?", [answered])[1]


@pytest.fixture
def refusing(retriever, monkeypatch):
    """The index with a refusal threshold."""
    settings = retriever.store.manifest.settings
    refusing = settings.model_copy(update={"refusal": Chosen[list[float]](value=[1, 0, 0, -0.4], because="test")})
    monkeypatch.setattr(retriever.store, "manifest", retriever.store.manifest.model_copy(update={"settings": refusing}))
    return retriever


def test_a_question_that_the_documents_do_not_answer_is_refused_without_the_model(refusing):
    retriever, reader = refusing, Scripted()
    text, answer = ask(RetrievalChat(retriever, reader), "Who discovered penicillin in London?")
    assert text == NOT_FOUND and answer.refused and not reader.sent and answer.sources
    assert "close enough" in answer.because


def test_a_refusal_of_the_model_counts_as_one(retriever):
    _, answer = ask(RetrievalChat(retriever, Scripted("Not in the documents")), DEADLINE)
    assert answer.refused and "model" in answer.because
    assert not is_refusal("It is not in the documents room but in the hall.")


def test_a_server_gets_the_passages_in_the_last_question_only(retriever):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": DEADLINE},
        {"role": "assistant", "content": "15 January"},
        {"role": "user", "content": "And the costs?"},
    ]
    messages, sources, refusal = PassageFinder(retriever).add_passages(turns, lambda _: True)
    assert messages[:3] == turns[:3] and refusal is None
    assert messages[3]["content"].endswith("Question: And the costs?") and "$31,400" in messages[3]["content"]
    assert [source["number"] for source in sources] == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="last message"):
        PassageFinder(retriever).add_passages(turns[:3], lambda _: True)


def test_the_prompt_shows_passages_by_number_and_heading():
    passages = [Passage("a.md", "A", ("B",), "One."), Passage("b.md", "C", (), "Two.")]
    prompt = reading_prompt("Why?", passages)
    assert prompt.endswith("[1] A > B\nOne.\n\n[2] C\nTwo.\n\nQuestion: Why?") and NOT_FOUND in prompt


def test_a_quote_is_a_whole_sentence_of_wrapped_text():
    text = "The office is red.\nThe deadline for all\napplications is 5 May. Ask us.\n- Fee: 20 dollars\n- Form: online"
    passage = Passage("a.md", "A", (), text)
    assert (
        best_sentence(passage, "It is 5 May.", "When is the deadline?")
        == "The deadline for all\napplications is 5 May."
    )
    assert best_sentence(passage, "20 dollars", "What is the fee?") == "- Fee: 20 dollars"
    assert check_claims("“the deadline FOR all applications”", [passage]).false_quotes == ()
