"""Naming a language only when sure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.text import detect_language, detect_script

SENTENCES = {
    "en": "We were late because the train had stopped between two stations, but they kept our table for us.",
    "de": "Wir kamen zu spät, weil der Zug auf der Strecke stand, aber der Tisch war noch für uns frei.",
    "fr": "Nous sommes arrivés en retard parce que le train était en panne, mais la table était libre pour nous.",
    "es": "Llegamos tarde porque el tren se paró entre dos estaciones, pero la mesa estaba libre para nosotros.",
    "it": "Siamo arrivati tardi perché il treno si è fermato tra due stazioni, ma il tavolo era libero per noi.",
    "pt": "Chegámos tarde porque o comboio parou entre duas estações, mas a mesa não estava ocupada e foi para nós.",
    "nl": "We kwamen te laat omdat de trein op het spoor stond, maar de tafel was nog voor ons vrij en het eten ook.",
    "sv": "Vi kom för sent eftersom tåget stannade mellan två stationer, men bordet var inte taget och det är bra.",
    "da/no": "Vi kom for sent fordi toget var stoppet mellem to stationer, men bordet var ikke taget, og det var godt.",
    "pl": "Spóźniliśmy się, bo pociąg nie mógł jechać dalej, ale stolik był już dla nas wolny, co jest bardzo miłe.",
    "cs": "Přijeli jsme pozdě, protože vlak byl mezi stanicemi, ale stůl pro nás už nebyl obsazený, což je dobře.",
    "tr": "Tren iki istasyon arasında durduğu için geç kaldık ama masa bizim için çok önce ayrılmış ve daha boş.",
    "fi": "Tulimme myöhässä, koska juna oli pysähtynyt, mutta pöytä ei ollut varattu ja se oli vielä vapaa.",
    "ro": "Am ajuns târziu pentru că trenul s-a oprit între două stații, dar masa nu era ocupată și a fost bine.",
    "id": "Kami terlambat karena kereta itu berhenti di antara dua stasiun, tetapi meja untuk kami tidak diambil.",
    "vi": "Chúng tôi đến muộn vì tàu đã dừng giữa hai ga, nhưng bàn của chúng tôi vẫn còn và không có người ngồi.",
    "hu": "Későn érkeztünk, mert a vonat nem tudott menni, de az asztal még szabad volt, és ez nagyon jó volt.",
    "ru": "Мы опоздали, потому что поезд остановился между станциями, но столик всё ещё был свободен, и это хорошо.",
    "uk": "Ми запізнилися, бо потяг зупинився між станціями, але столик іще був вільний, і їжа теж.",
    "GREEK": "Αργήσαμε γιατί το τρένο σταμάτησε ανάμεσα σε δύο σταθμούς.",
    "HEBREW": "איחרנו כי הרכבת עצרה בין שתי תחנות, אבל השולחן עדיין היה פנוי.",
    "ar": "تأخرنا لأن القطار توقف بين محطتين، لكن الطاولة كانت لا تزال فارغة إلى أن وصلنا.",
    "hi": "हम देर से पहुँचे क्योंकि ट्रेन दो स्टेशनों के बीच में रुक गई थी।",
    "THAI": "เรามาสายเพราะรถไฟหยุดระหว่างสองสถานี",
    "ja": "電車が駅の間で止まったので遅れましたが、席はまだ空いていました。",
    "zh": "我们迟到了，因为火车停在两个车站之间，不过桌子还空着。",
    "HANGUL": "기차가 두 역 사이에서 멈춰서 우리는 늦었습니다.",
}
UNSURE = [
    "",
    "   \n",
    "42",
    "3.14159 + 2.71828 = 5.85987",
    "OK",
    "Paris",
    "Maria de la Cruz y Vega",
    "Vincent van Gogh, Ludwig van Beethoven, Las Vegas, El Salvador, Der Spiegel, La Paz, Den Haag",
    "Jean de la Fontaine et Marie de Saint-Denis",
    "for i in range(10):\n    if i not in seen and x is None:\n        return i, items[i]\n",
    "SELECT name FROM users WHERE id IN (1, 2) AND age IS NOT NULL ORDER BY name DESC",
    "select a from b where c is not null and d in (select e from f) order by g",
    'function add(a, b) { return a + b; } // this.total = "x"',
    "```python\nthe = of(to, a)\nwas = that(this, which, have, has, had, it, its)\n```",
    "`the` `of` `was` `were` `that` `which`",
    "https://example.com/the/of/was/were/that/which",
    "apple, banana, cherry, date, elderberry, fig, grape",
    "東京大学",
    "E101: x, y, z; A1 B2 C3 D4",
    "qwrt plmk zzxc vbnm asdf ghjk qwer",
    "α + β = γ",
    "The Danish sentence is: Det er ikke en god dag. And the Swedish one is: Det är inte en bra dag för mig och dig.",
    "ale po tom jeho brat bez slova už za to do hory",
    "Bonjour, I am here. Guten Tag. Buenos días, señor.",
]


@pytest.mark.parametrize("language", SENTENCES)
def test_a_sentence_tells_its_language(language):
    """Guards the table of function words and the scripts."""
    assert detect_language(SENTENCES[language]) == language


@pytest.mark.parametrize("text", UNSURE)
def test_names_code_numbers_and_mixtures_tell_nothing(text):
    """Guards against accusing a model of another language because of a name or a line of code."""
    assert detect_language(text) is None


@pytest.mark.parametrize("language", SENTENCES)
def test_any_part_of_a_sentence_tells_its_language_or_nothing(language):
    """Guards against a claim made too early: a short text may be None, never another language."""
    words = SENTENCES[language].split()
    for begin in range(len(words)):
        for end in range(begin + 1, len(words) + 1):
            assert detect_language(" ".join(words[begin:end])) in (None, language)


@given(st.text(max_size=200))
def test_no_text_is_too_odd(text):
    """Guards against characters without a name or a script."""
    assert (
        detect_language(text) is None or detect_script(text) is not None or "`" in text or "http" in text or "@" in text
    )


def test_the_alphabet_is_told_where_the_language_is_not():
    """Guards the check that needs no language: Cyrillic in place of Latin."""
    assert detect_script("Гора Мусала, България") == "CYRILLIC"
    assert detect_script("a few words of English") == "LATIN"
    assert detect_script("東京タワーは高い") == "CJK"
    assert detect_script("12") is None
