"""Train the GPT-2 that ships in tinyvllm/assets/tiny-gpt2, from nothing but this file.

    python scripts/train_tiny_gpt2.py --out DIR [--evidence FILE.json]

It takes five hours on one core; book/data/tiny_gpt2.json has the minutes, the processor and the
versions. The same seed tells the same stories; the last bits of weights depend on the processor.

Four parts, in order:

1. A *story grammar*: word lists and templates that write short English stories. A story has a hero
   with a trait, a place, an object, a friend, a problem, attempts, a turn in which the trait
   matters, and a resolution that refers back to all of them. Every random choice is counted, so
   a story knows its own probability.
2. A byte-level BPE tokenizer with 1024 tokens, learned from stories.
3. A GPT-2 with 4 layers, trained on rows of up to 1024 tokens: stories back to back, each one
   closed by <|endoftext|>.
4. What it learned, measured on stories that it has not seen.

Held out: one in eight of the pairs (hero's name, place), chosen by a checksum. No training story
has such a pair, and the opening sentence of a story names both; so a held-out story begins with
an opening that the model has never seen.

Importing this file defines the grammar and runs nothing; torch is imported where it is used.
"""

import argparse
import json
import math
import platform
import random
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

EOS = "<|endoftext|>"


def choices(text: str) -> list[str]:
    """The alternatives of "a|b c|d", or the words of "a b d"."""
    return text.split("|") if "|" in text else text.split()


# --------------------------------------------------------------------------------------
# 1a. The words
#
# In every template `[a|b|c]` is a choice (it may be nested, and an alternative may be empty) and
# `{slot}` is a word that the story has already decided. "a" becomes "an" where it must.
# --------------------------------------------------------------------------------------

GIRLS = choices(
    "Ada Alma Bella Clara Dora Edith Ella Emma Flora Freya Greta Hanna Ida Iris Ivy Lena Lily Mabel "
    "Mia Nora Olga Rosa Selma Vera"
)
BOYS = choices(
    "Adam Anton Ben Bruno Casper David Emil Felix Finn George Henry Hugo Jack Jonas Leo Linus Milo "
    "Nils Oscar Otto Peter Sam Theo Victor"
)

# Friends have names of their own kind, so that who is the hero can be read off the name.
FRIEND_NAMES = choices(
    "Bibo Bramble Buttons Chip Clover Cricket Dot Fidget Flick Hazel Moss Nib Pebble Pepper Pip Quill "
    "Rusty Skip Tansy Thistle Tuck Twig Whisk Ziggy"
)

ANIMALS = choices(
    "rabbit mouse hedgehog squirrel otter badger fox bear hare mole frog goose goat cat puppy "
    "beaver duckling lamb"
)
KINDS = (*ANIMALS, "girl", "boy")

# Article-free phrase after "lived", the phrase used later, four spots, three people of the place.
PLACES = {
    "village": (
        "in a small village by the sea",
        "in the village",
        "under an upturned boat|behind the fish market|between two wet rocks|in a coil of old rope",
        "old fisherman|lighthouse keeper|net mender",
    ),
    "forest": (
        "at the edge of a deep forest",
        "in the forest",
        "inside a hollow log|under a bed of ferns|behind a fallen oak|in a ring of mushrooms",
        "woodcutter|wise old owl|forest ranger",
    ),
    "farm": (
        "on a farm with a yellow barn",
        "on the farm",
        "under the hay|behind the milk cans|in the chicken house|beside the water pump",
        "farmer|tired plough horse|milkmaid",
    ),
    "hill": (
        "on a windy hill above a river",
        "on the hill",
        "in the long grass|behind the stone wall|under a thorn bush|beside a rabbit hole",
        "shepherd|kite maker|passing pedlar",
    ),
    "town": (
        "in a town with a tall clock tower",
        "in the town",
        "under a market stall|behind the clock tower|on the town hall steps|beside the fountain",
        "clock maker|town crier|street sweeper",
    ),
    "lake": (
        "beside a quiet lake",
        "by the lake",
        "among the reeds|under the wooden pier|in an old rowing boat|on a flat stone by the water",
        "ferryman|grey heron|boat builder",
    ),
    "island": (
        "on a small green island",
        "on the island",
        "in a cave above the beach|under a palm leaf|behind a heap of driftwood|in a tide pool",
        "old sailor|slow sea turtle|pearl diver",
    ),
    "valley": (
        "in a valley between snowy mountains",
        "in the valley",
        (
            "under a snowy fir tree|behind the cheese hut|beside the frozen stream|in a pile "
            "of firewood"
        ),
        "mountain guide|cheese maker|old hermit",
    ),
    "garden": (
        "in a garden behind an old castle",
        "in the garden",
        "under the rose bushes|behind the sundial|in an empty flower pot|beside the lily pond",
        "gardener|friendly snail|castle guard",
    ),
    "inn": (
        "at an inn beside a busy road",
        "at the inn",
        "under the kitchen table|behind the stable|in an empty barrel|beneath the back stairs",
        "innkeeper|cook|travelling merchant",
    ),
    "mill": (
        "in an old mill by a stream",
        "at the mill",
        "behind the flour sacks|under the mill wheel|in the dusty loft|beside the stream",
        "miller|grain carrier|white dove",
    ),
    "harbour": (
        "in a harbour full of white ships",
        "in the harbour",
        "behind a stack of crates|under a torn sail|beside an iron anchor|in an empty fish basket",
        "harbour master|sail maker|rope seller",
    ),
    "desert": (
        "on the edge of a wide desert",
        "in the desert",
        "beside the well|under a date palm|behind a tall dune|in the shade of a red rock",
        "camel driver|well keeper|wrinkled tortoise",
    ),
    "meadow": (
        "in a meadow full of wild flowers",
        "in the meadow",
        "among the daisies|under a patch of clover|beside the little brook|behind the beehives",
        "beekeeper|wise old toad|honey seller",
    ),
    "street": (
        "in a narrow street above a bakery",
        "in the street",
        "behind the flour bins|under the shop window|beside the lamp post|in the rain barrel",
        "baker|postman|lamp lighter",
    ),
    "station": (
        "at a railway station in the hills",
        "at the station",
        "under the long bench|behind the ticket office|in the coal shed|beside the signal lamp",
        "station master|train driver|ticket collector",
    ),
    "marsh": (
        "near a ruined tower in the marsh",
        "in the marsh",
        "among the cattails|in a hollow willow|under the broken stairs|beside a muddy pool",
        "peat cutter|basket weaver|white stork",
    ),
    "orchard": (
        "in an orchard of apple trees",
        "in the orchard",
        (
            "under the oldest apple tree|in a crate of pears|behind the cider press|beside the "
            "long ladder"
        ),
        "apple picker|cider maker|friendly blackbird",
    ),
    "school": (
        "in a school at the foot of a cliff",
        "at the school",
        "under the last desk|behind the coat rack|in the chalk box|beside the school gate",
        "teacher|school cook|caretaker",
    ),
    "circus": (
        "in a circus that camped outside the city",
        "at the circus",
        "under a wooden bench|behind the big tent|in a heap of costumes|beside the ticket booth",
        "juggler|sad clown|tightrope walker",
    ),
    "palace": (
        "in a palace with a hundred rooms",
        "in the palace",
        "behind a velvet curtain|under the grand stairs|in a suit of armour|beside the royal oven",
        "palace cook|royal gardener|young prince",
    ),
    "ship": (
        "on a ship that sailed the northern sea",
        "on the ship",
        "under a hammock|behind the ship's wheel|in a barrel of apples|beside the anchor chain",
        "captain|ship's carpenter|first mate",
    ),
    "cottage": (
        "in a cottage under a great oak",
        "at the cottage",
        "under the woodpile|behind the chimney|in the vegetable patch|beneath the roots of the oak",
        "candle maker|mushroom gatherer|old weaver",
    ),
    "city": (
        "in a city with forty bridges",
        "in the city",
        "under the oldest bridge|behind the flower shop|on a narrow ledge|beside the canal",
        "bridge keeper|glass blower|flower seller",
    ),
}

# Adjectives, a part that may break, what one does with it, and how it can call someone from afar
# ("" where it cannot: what the hero does, what the friend notices).
OBJECTS = {
    "kite": (
        "red|paper|striped|yellow",
        "string",
        (
            "flew it whenever the wind was good|ran with it until {his} legs were tired|"
            "dreamed of flying it above the clouds"
        ),
        "flew the kite as high as it would go|saw the kite",
    ),
    "lantern": (
        "brass|green|rusty|copper",
        "handle",
        "lit it every evening|polished it on Sundays|hung it by the door at night",
        "swung the lantern to and fro|saw the light of the lantern",
    ),
    "drum": (
        "tin|painted|round|blue",
        "rim",
        "played it every morning|beat it while {he} marched about|tapped on it when it rained",
        "beat the drum again and again|heard the drum",
    ),
    "bell": (
        "silver|golden|little|brass",
        "clapper",
        "rang it before breakfast|shined it with {his} sleeve|loved its clear sound",
        "rang the bell with all {his} might|heard the bell",
    ),
    "whistle": (
        "wooden|silver|tiny|tin",
        "mouthpiece",
        "blew it to greet the birds|wore it on a string|carved little marks in it",
        "blew the whistle three times|heard the whistle",
    ),
    "flute": (
        "bamboo|ivory|thin|silver",
        "mouthpiece",
        "played it at sunset|practised a new tune every week|played it to the stars",
        "played the loudest song on the flute|heard the flute",
    ),
    "trumpet": (
        "golden|dented|shiny|copper",
        "mouthpiece",
        "practised it behind the house|blew it on holidays|polished it until it gleamed",
        "blew the trumpet as loudly as {he} could|heard the trumpet",
    ),
    "fiddle": (
        "brown|old|cherry-wood|black",
        "bow",
        "played it after supper|made everyone dance with it|tuned it with great care",
        "played a wild dance on the fiddle|heard the fiddle",
    ),
    "mirror": (
        "round|silver|dusty|little",
        "frame",
        "made faces in it|caught sunbeams with it|wiped it clean every day",
        "flashed the mirror in the last light|saw the flash of the mirror",
    ),
    "umbrella": (
        "yellow|spotted|purple|huge",
        "handle",
        "carried it even in the sun|danced under it in the rain|twirled it on the way home",
        "opened the umbrella and waved it about|saw the bright umbrella",
    ),
    "flag": (
        "white|checked|orange|long",
        "pole",
        "waved it at every passing cart|washed it by hand|raised it each morning",
        "waved the flag above {his} head|saw the flag",
    ),
    "compass": (
        "brass|tiny|golden|scratched",
        "needle",
        "carried it in {his} pocket|looked at it before every walk|always knew the way with it",
        "",
    ),
    "telescope": (
        "long|brass|black|folding",
        "lens",
        "watched the moon through it|counted far-away birds with it|looked at the stars through it",
        "",
    ),
    "teapot": (
        "blue|china|spotted|copper",
        "lid",
        "made mint tea in it|warmed {his} hands on it|filled it for every guest",
        "",
    ),
    "scarf": (
        "woollen|red|soft|striped",
        "fringe",
        "wore it all winter|slept with it under {his} head|wrapped it twice around {his} neck",
        "",
    ),
    "hat": (
        "straw|green|pointed|velvet",
        "brim",
        "wore it everywhere|tipped it to everyone|kept small treasures in it",
        "",
    ),
    "wagon": (
        "red|wooden|squeaky|little",
        "wheel",
        (
            "pulled it up and down the path|filled it with stones and leaves|gave the snails a "
            "ride in it"
        ),
        "",
    ),
    "sled": (
        "fast|wooden|blue|small",
        "runner",
        "waxed it even in summer|raced it down every slope|sat on it and dreamed of snow",
        "",
    ),
    "bicycle": (
        "green|rusty|silver|second-hand",
        "pedal",
        "rode it to every corner|oiled its chain on Saturdays|sang while {he} rode it",
        "",
    ),
    "boat": (
        "toy|paper|white|walnut-shell",
        "mast",
        "sailed it in every puddle|gave it a new name each week|built it a harbour of sand",
        "",
    ),
    "puppet": (
        "wooden|smiling|dancing|ragged",
        "arm",
        "made it dance and bow|told it all {his} secrets|sewed new clothes for it",
        "",
    ),
    "ball": (
        "red|leather|bouncing|striped",
        "seam",
        "threw it against the wall|rolled it down the path|bounced it a hundred times a day",
        "",
    ),
    "book": (
        "thick|leather|blue|secret",
        "cover",
        "read it under the blanket|learned it by heart|drew pictures on its last page",
        "",
    ),
    "map": (
        "yellowed|folded|painted|treasure",
        "corner",
        "studied it by candlelight|drew new roads on it|spread it out on the floor",
        "",
    ),
    "key": (
        "iron|golden|rusty|crooked",
        "ring",
        "wondered which door it opened|wore it around {his} neck|tried it in every lock",
        "",
    ),
    "locket": (
        "golden|heart-shaped|silver|oval",
        "clasp",
        "wore it day and night|opened it to look at the picture|held it tight when {he} was sad",
        "",
    ),
    "watch": (
        "silver|ticking|pocket|golden",
        "spring",
        "wound it every night|listened to its ticking|checked it ten times an hour",
        "",
    ),
    "basket": (
        "willow|round|brown|deep",
        "handle",
        "carried berries in it|filled it with nuts|took it along on every walk",
        "",
    ),
    "blanket": (
        "patchwork|warm|grey|woollen",
        "edge",
        "wrapped {himself} in it every night|had picnics on it|built tents with it",
        "",
    ),
    "cup": (
        "clay|silver|chipped|blue",
        "handle",
        "drank milk from it|kept it on the window sill|never drank from any other",
        "",
    ),
    "paintbrush": (
        "fine|long|wooden|soft",
        "tip",
        "painted clouds with it|washed it with great care|painted a picture every day",
        "",
    ),
    "music box": (
        "silver|tiny|painted|old",
        "crank",
        "wound it up before bed|hummed along with its tune|listened to it when it rained",
        "",
    ),
}

# Noun of the trait, how it shows in daily life, and what it makes the hero do at the turn.
TRAITS = {
    "brave": (
        "courage",
        (
            "{He} was not even afraid of thunder|{He} always went first into the dark|When "
            "others hid, {hero} stood still and looked"
        ),
        (
            "took a deep breath and went on without fear|did not turn back, although {his} "
            "knees were shaking|stepped forward when everyone else stepped back|faced the "
            "problem instead of running away|swallowed {his} fear and started at once"
        ),
    ),
    "curious": (
        "curiosity",
        (
            "{He} asked a hundred questions a day|{He} looked under every stone|{He} always "
            "wanted to know why"
        ),
        (
            "asked one question after another until {he} understood|looked at everything twice "
            "and noticed what others had missed|wanted to know why, and kept on looking|"
            "followed every clue, even the smallest one|turned the matter over and looked at "
            "it from all sides"
        ),
    ),
    "patient": (
        "patience",
        (
            "{He} could watch a snail cross the path from end to end|{He} never hurried and "
            "never complained|{He} was happy to wait for anything"
        ),
        (
            "waited quietly and did not give up|tried again, slowly, and then once more|"
            "counted to one hundred and thought it over|took one small step after another|let "
            "the hours pass without a word of complaint"
        ),
    ),
    "kind": (
        "kindness",
        (
            "{He} carried beetles off the road|{He} always shared the last biscuit|{He} had a "
            "good word for everyone"
        ),
        (
            "thought of the others first|spoke so warmly that everyone wanted to help|offered "
            "help before {he} asked for any|said a gentle word where others would have shouted|"
            "remembered how it feels to be sad, and acted on it"
        ),
    ),
    "clever": (
        "cleverness",
        (
            "{He} could solve any riddle|{He} knew a trick for everything|{He} had won every "
            "game of chess"
        ),
        (
            "drew a plan in the dust|thought of a trick that nobody had tried|put two and two "
            "together|remembered something from an old book|found a way that was as easy as it "
            "was smart"
        ),
    ),
    "honest": (
        "honesty",
        (
            "{He} had never told a lie|{He} gave back every penny {he} found|{He} said what "
            "{he} thought, even when it was hard"
        ),
        (
            "told the whole truth, from beginning to end|made no excuses and looked at things "
            "as they were|said plainly what {he} knew and what {he} did not|did not pretend to "
            "know the answer and began to look for it|promised only one thing, to try, and "
            "kept {his} word"
        ),
    ),
    "stubborn": (
        "stubbornness",
        (
            "Once {he} had started something, {he} never stopped|{He} hardly ever changed "
            "{his} mind|No was a word that {he} did not like"
        ),
        (
            "refused to give up|tried for the tenth time when others would have stopped at two|"
            "shook {his} head and began all over again|would not go home before it was done|"
            "set {his} jaw and kept at it"
        ),
    ),
    "cheerful": (
        "cheerfulness",
        (
            "{He} whistled from morning to night|{He} laughed even when it rained|Nobody had "
            "ever seen {him} in a bad mood"
        ),
        (
            "began to sing, and soon the work felt easy|laughed at the trouble and went on|"
            "made a joke, and everyone felt lighter|smiled and said that tomorrow would come "
            "anyway|hummed a merry tune and tried once more"
        ),
    ),
    "gentle": (
        "gentleness",
        (
            "{He} never raised {his} voice|Birds ate from {his} hand|{He} walked softly so as "
            "not to wake anyone"
        ),
        (
            "moved so softly that nothing was harmed|spoke in a low and friendly voice|used no "
            "force at all|took great care not to frighten anyone|worked with light and loving "
            "hands"
        ),
    ),
    "careful": (
        "care",
        (
            "{He} looked twice before {he} crossed the road|{He} never spilled a drop|{He} "
            "packed {his} bag the night before"
        ),
        (
            "checked everything twice before {he} began|marked the way with white pebbles|tied "
            "a double knot, just to be safe|made a list and followed it step by step|left "
            "nothing to chance"
        ),
    ),
    "generous": (
        "generosity",
        "{He} gave away half of every apple|{He} loved to make presents|What {he} had, {he} shared",
        (
            "gave away {his} own lunch to get help|promised to share whatever came of it|"
            "offered the best thing that {he} had|asked for nothing in return|shared all {he} "
            "had in {his} pockets"
        ),
    ),
    "hopeful": (
        "hope",
        (
            "{He} believed that every storm had an end|{He} planted seeds even in autumn|{He} "
            "always saw the sunny side"
        ),
        (
            "was sure that things would turn out well|looked up at the first star and made a "
            "wish|told {himself} that there was always a way|kept {his} eyes on the bright "
            "side and went on|saw a little light where others saw none"
        ),
    ),
    "polite": (
        "politeness",
        (
            "{He} said good morning to every sparrow|{He} never forgot to say thank you|{He} "
            "bowed to the old and waved to the young"
        ),
        (
            "said please, and said it twice|bowed and asked for advice|took off {his} cap and "
            "asked very nicely|waited for {his} turn and then spoke well|thanked everyone, "
            "even before they had helped"
        ),
    ),
    "thoughtful": (
        "thought",
        (
            "{He} remembered every birthday|{He} liked to sit on the steps and think|{He} "
            "never spoke before {he} had thought"
        ),
        (
            "sat down and thought until the answer came|asked {himself} what a friend would "
            "need|thought first and acted afterwards|remembered what everyone had said that "
            "day|went through the whole day again in {his} mind"
        ),
    ),
    "quick": (
        "quickness",
        (
            "{He} could outrun the wind|{He} finished {his} work before others began|{He} was "
            "up and dressed before the sun"
        ),
        (
            "ran as fast as {his} legs could carry {him}|was gone before anyone could blink|"
            "did not lose a single minute|acted at once, before it was too late|darted off "
            "like an arrow"
        ),
    ),
    "quiet": (
        "quietness",
        (
            "{He} spoke little and saw much|{He} liked the early hours best|{He} could sit so "
            "still that the birds forgot {him}"
        ),
        (
            "kept still and listened|heard what nobody else had heard|said nothing and watched "
            "closely|closed {his} eyes and listened to the wind|noticed a small sound that "
            "others had talked over"
        ),
    ),
    "loyal": (
        "loyalty",
        (
            "{He} never broke a promise|{He} stood by {his} friends in rain and shine|{He} "
            "kept every secret"
        ),
        (
            "kept {his} promise, whatever it cost|would not leave before everyone was safe|"
            "stayed when it would have been easy to leave|thought of {friend} and did not give "
            "in|remembered that {friend} would have done the same"
        ),
    ),
    "calm": (
        "calmness",
        (
            "Nothing could upset {him}|{He} breathed slowly, like the tide|{He} stayed cool "
            "even in a storm"
        ),
        (
            "breathed in, breathed out and began|did not shout and did not cry|waited until "
            "{his} heart beat slowly again|stayed cool and took things one by one|kept a "
            "steady hand and a clear head"
        ),
    ),
    "playful": (
        "playfulness",
        (
            "{He} turned every chore into a game|{He} skipped where others walked|{He} knew "
            "forty games by heart"
        ),
        (
            "turned the whole thing into a game|pretended to be a pirate on a quest|made up a "
            "rhyme about it, and the rhyme gave {him} an idea|tossed a pebble to decide where "
            "to begin|treated it like a riddle and grinned"
        ),
    ),
    "determined": (
        "determination",
        (
            "{He} finished whatever {he} began|{He} practised until it worked|{He} had climbed "
            "every tree, the tall ones twice"
        ),
        (
            "rolled up {his} sleeves and did not rest|promised {himself} to see it through|"
            "made up {his} mind and stuck to it|fell down twice and got up three times|worked "
            "until the job was done"
        ),
    ),
}

FIXES = choices(
    "a piece of wire|a drop of glue|a strip of leather|some strong thread|a small nail|"
    "a green ribbon|a bit of string|a wooden peg|a bent pin|a patch of cloth"
)
HIGH_AND_LOW = choices(
    "at the top of a tall tree|on a steep roof|on a narrow ledge|in a deep hole|"
    "between two heavy stones|in thick mud|behind an iron gate|at the bottom of a dry well|"
    "in a bramble hedge|on top of a high wall"
)
TOOLS = choices(
    "a long pole|a rope|a ladder|a fishing rod|a plank|a rake|an iron hook|a forked branch"
)
THIEVES = choices("magpie crow jackdaw raccoon weasel monkey")
TREATS = choices(
    "a handful of nuts|a shiny button|a piece of cheese|a ripe plum|a slice of pie|"
    "a glass bead|a honey cake|a silver spoon"
)
WEATHER = choices("a thick fog|a great storm|a dark night|a heavy rain|a grey mist")
EVENTS = choices(
    "the great fair|the grand feast|the lantern parade|the talent show|the night market|"
    "the mayor's birthday"
)
PRIZES = choices(
    "a blue ribbon|a basket of plums|a silver medal|a big round cake|a wreath of flowers|"
    "a jar of honey"
)
CHORES = choices(
    "swept the yard|carried water|chopped wood|fed the hens|washed windows|delivered letters|"
    "picked berries|peeled potatoes|polished boots|stacked crates"
)

# --------------------------------------------------------------------------------------
# 1b. The templates
# --------------------------------------------------------------------------------------

OPENINGS = (
    (
        "[Once upon a time|Once|Long ago|Many years ago|A long time ago|Not so long ago], a "
        "{trait} [little |young |]{kind} [named|called] {hero} lived {home}."
    ),
    (
        "[Once upon a time|Long ago|One summer|One winter], there [was|lived] a {trait} "
        "[little |young |]{kind} [named|called] {hero} {home}."
    ),
    "{Home} lived a {trait} [little |young |]{kind} [named|called] {hero}.",
    (
        "{Home}, [far away from here|where the days were long|where everyone knew everyone], "
        "lived a {kind} [named|called] {hero}, and {he} was very {trait}."
    ),
    "{hero} was a {trait} [little |young |]{kind} who lived {home}.",
    "{Hero_full} lived {home}, and everyone said that {he} was [very|truly|really] {trait}.",
)

HABITS = (
    "{habit}.",
    (
        "{habit}, [and everyone liked {him} for it|and that will matter later|as {his} mother "
        "liked to say]."
    ),
    "{habit}. [That was just how {he} was|Such was {hero}|It was {his} nature].",
)

OWNS = (
    "{hero} [had|owned|kept] a {adjective} {noun} and {daily}.",
    (
        "{His} [greatest treasure|favourite thing|dearest possession] was a {adjective} "
        "{noun}. {He} {daily}."
    ),
    "For {his} birthday {he} had been given a {adjective} {noun}, and {he} {daily}.",
    (
        "{His} [grandfather|grandmother|uncle|aunt|big sister] had given {him} a {adjective} "
        "{noun}. {hero} {daily}."
    ),
    "Of all {his} things {hero} loved the {adjective} {noun} best. {He} {daily}.",
    "{hero} went nowhere without {his} {adjective} {noun}. {He} {daily}.",
)

FRIENDS = (
    (
        "{His} best friend was {friend}, a {friend_kind} [with a big heart|who lived next door|"
        "who was always hungry|with bright eyes|who loved to talk]."
    ),
    (
        "{He} had a friend [named|called] {friend}, a [merry|sleepy|round|tall|freckled|"
        "clumsy] {friend_kind}."
    ),
    (
        "{hero} and {friend_full} [did everything together|had been friends for years|met "
        "every day|were as close as two peas in a pod]."
    ),
)

DAYS = (
    "One [windy|rainy|bright|cold|warm|grey] [morning|afternoon|evening],",
    "One day,",
    "Then one [Monday|Tuesday|Friday|Sunday],",
)

FEELINGS = (
    "{hero} felt [sad|lost|terrible|a lump in {his} throat|{his} heart sink].",
    "A tear rolled down {hero}'s [cheek|nose].",
    '"Oh no!" [cried|said|whispered] {hero}. "[What shall I do|What now|How could this happen]?"',
    '"Not [today|now|again]!" {hero} [cried|sighed|groaned].',
    "{hero} did not know whether to [laugh or cry|shout or cry|run or hide].",
    (
        "{hero} sat down on a [stone|step|log|bucket] and [sighed|put {his} head in {his} "
        "hands|stared at the ground]."
    ),
)

FRIEND_ARRIVES = (
    (
        "[Just then|At that moment|Soon|A little later] {friend_full} came [by|along|running|"
        "around the corner]."
    ),
    (
        "A {friend_kind} [named|called] {friend} [saw {him}|heard {him} sigh] and [stopped|"
        "came closer]."
    ),
    (
        "{Friend_full}, who was [out for a walk|on the way to market|passing by], [stopped|"
        "noticed that something was wrong]."
    ),
)
FRIEND_COMES_BACK = (
    (
        "[Just then|At that moment|Soon|A little later] {friend} came [by|along|running|around "
        "the corner]."
    ),
    "{friend} [heard the news|noticed at once that something was wrong] and came to {hero}.",
    "{He} ran to {friend} and told the whole story.",
)
FRIEND_SPEAKS = (
    (
        '"[Do not worry|Do not cry|Cheer up|Never mind], {hero}," said {friend}. "[We will|'
        'Together we can|I will help you] {goal}."'
    ),
    '"What is the matter, {hero}?" asked {friend}. "I [must|have to|want to] {goal}," said {hero}.',
    (
        '"[Why are you so sad|What is wrong]?" asked {friend}. {hero} [told {friend} '
        'everything|explained what had happened]. "Then we will {goal}," said {friend}, "[you '
        'and I|before the sun goes down|right now]."'
    ),
    '"Two heads are better than one," said {friend}. "Let us {goal} together."',
    '"You are {trait}, {hero}," said {friend}. "If anyone can {goal}, it is you."',
    (
        '"[I know|I am sure] you can {goal}, {hero}," said {friend}. "I know nobody as {trait} '
        'as you."'
    ),
)
ALONE = (
    '"I [must|have to|will] {goal}," {hero} said to {himself}.',
    "There was only one thing to do: {hero} had to {goal}.",
    '"[Nobody else can do it|It is up to me]," said {hero}. "I will {goal}."',
)

HELPERS = (
    (
        'A {helper} [came past|looked up|was resting nearby]. "[Let me give you some advice|I '
        'have lived long and seen much|Listen to me]," said the {helper}. "{hint}."'
    ),
    '{hero} [met|asked|went to] a {helper}. "{hint}," said the {helper}.',
    (
        'On the way stood a {helper}. "[Excuse me|Please], how can I {goal}?" asked {hero}. '
        '"{hint}," [answered|replied|said] the {helper}.'
    ),
)

MEANWHILE = (
    "[By now|By then|Meanwhile] the sun was [setting|low|high in the sky].",
    (
        "[It began to drizzle|The wind rose|The clouds grew dark|A cold wind blew], but nobody "
        "thought of going home."
    ),
    "Somewhere [a dog barked|a door slammed|a bell rang|a cow mooed|an owl called].",
)

TURNS = (
    "But {hero} was {trait}, so {he} {act}.",
    "Now it [helped|mattered|was good] that {hero} was {trait}: {he} {act}.",
    (
        "[Anyone else|Another {kind}|Someone else] would have [gone home|given up], but "
        "{trait} {hero} {act}."
    ),
    (
        'Then {hero} remembered what {his} [mother|father|grandmother] always said: "You are '
        '{trait}, {hero}." {He} {act}.'
    ),
    "Because {hero} was so {trait}, {he} {act}.",
    "This was a job for a {trait} {kind}. {hero} {act}.",
)


@dataclass(frozen=True)
class Plot:
    """One kind of problem. `goal` completes "I must ..."; the rest are templates, one is chosen."""

    goal: str
    trouble: tuple[str, ...]  # follows "One day,", so it starts in lower case or with a name
    tries: tuple[str, ...]
    hints: tuple[str, ...]  # what a helper says, without the full stop
    solutions: tuple[str, ...]
    thanks: tuple[str, ...]
    friend_first: bool = False  # the friend must be known before the trouble starts
    alone: bool = False  # the friend cannot come to help


PLOTS = {
    "lost": Plot(
        "find the {noun}",
        (
            "{hero} reached for the {noun}, but it was gone.",
            "{hero} woke up, and the {adjective} {noun} was nowhere to be seen.",
            "{hero} noticed that {his} bag was open and that the {noun} was missing.",
        ),
        (
            (
                "They looked [under the beds|behind the doors|in every cupboard], but they "
                "found only [dust|a button|an old sock|a sleeping cat]."
            ),
            (
                "{friend} searched on the left and {hero} searched on the right, but neither "
                "of them saw the {noun}."
            ),
            "They asked everyone {here}, but nobody had seen a {adjective} {noun}.",
        ),
        (
            "I saw something {adjective} {spot}",
            "Look {spot}, that is where lost things end up",
            "The last time I lost something, it was {spot}",
        ),
        (
            "And there, {spot}, lay the {adjective} {noun}.",
            "At last {he} looked {spot}. There it was, the {adjective} {noun}!",
            "Something [gleamed|moved|caught {his} eye] {spot}. It was the {noun}!",
        ),
        (
            "From then on {hero} always knew where {his} {noun} was.",
            (
                "{hero} tied a [ribbon|label|string] to the {noun} so that it could not get "
                "lost again."
            ),
            '"Lost and found," laughed {friend}, and {hero} held the {adjective} {noun} tight.',
        ),
    ),
    "broken": Plot(
        "mend the {noun}",
        (
            "{hero} stumbled, and the {part} of the {noun} broke.",
            "there was a loud crack. The {part} of the {adjective} {noun} had snapped.",
            "{hero} dropped the {noun} on a stone, and the {part} came off.",
        ),
        (
            (
                "They tried to tie the {part} with [grass|a hair|a strip of paper], but it did "
                "not hold."
            ),
            "{friend} pressed the {part} back into its place, but it fell off again.",
            (
                "They stuck the {part} on with [honey|mud|porridge], and it only made the "
                "{noun} sticky."
            ),
        ),
        (
            "All you need is {fix}",
            "A broken {part} is not the end of the world, take {fix}",
            "With {fix} you can mend almost anything",
        ),
        (
            "With {fix}, {hero} fixed the {part}, and the {noun} was as good as new.",
            "{He} took {fix} and worked until the {part} sat tight again.",
            "{hero} found {fix}, and before evening the {adjective} {noun} was whole again.",
        ),
        (
            (
                "You could still see where the {part} had been mended, and {hero} liked the "
                "{noun} all the more for it."
            ),
            "The {noun} with the mended {part} was now the most famous {noun} of all.",
            "After that {hero} mended things for everyone {here}, always with {fix}.",
        ),
    ),
    "stuck": Plot(
        "get the {noun} back",
        (
            "{hero} tripped, and the {noun} flew out of {his} hands and landed {where}.",
            "a gust of wind took the {adjective} {noun} and left it {where}.",
            "{hero} swung the {noun} a little too hard, and it ended up {where}.",
        ),
        (
            "{hero} stretched out {his} arm, but it was too short.",
            (
                "{friend} [jumped|climbed|crawled] as far as a {friend_kind} can, but could "
                "not reach the {noun}."
            ),
            "They threw [a stone|an apple|a shoe] at it, but the {noun} did not move.",
        ),
        (
            "What you need is {tool}",
            "There is {tool} behind my door, you may take it",
            "Nothing is out of reach when you have {tool}",
        ),
        (
            "With {tool}, {hero} reached the {noun} and pulled it free.",
            "{He} fetched {tool}, and soon the {adjective} {noun} was back in {his} hands.",
            (
                "{friend} brought {tool}. {hero} held it with both hands, and at last the "
                "{noun} moved."
            ),
        ),
        (
            "There was only a tiny scratch on the {noun}, and {hero} was proud of it.",
            "From that day on {hero} held the {noun} with both hands.",
            "{hero} gave {the_tool} a place of honour beside the {noun}.",
        ),
    ),
    "taken": Plot(
        "win the {noun} back",
        (
            "a {thief} [snatched|stole|grabbed] the {adjective} {noun} and ran off with it.",
            "a {thief} came in through the window and took the {noun}.",
            "{hero} looked away for a moment, and a {thief} carried off the {noun}.",
        ),
        (
            "They chased the {thief}, but it was too fast.",
            "{friend} shouted at the {thief}, but it only laughed.",
            "They set a trap with a box and a stick, but the {thief} was too clever.",
        ),
        (
            "A {thief} can never say no to {treat}",
            "Do not chase the {thief}, give it {treat}",
            "The {thief} is only lonely, bring it {treat}",
        ),
        (
            "{He} held out {treat}, and the {thief} dropped the {noun} at once.",
            (
                "{hero} offered the {thief} {treat}, and in return it gave back the "
                "{adjective} {noun}."
            ),
            (
                "{He} put {treat} on the ground {spot}. The {thief} came to take it, and "
                "{hero} picked up the {noun}."
            ),
        ),
        (
            "The {thief} came to visit now and then, but it never touched the {noun} again.",
            "Even the {thief} became a friend of {hero}, and it always got {treat}.",
            "The {thief} watched over the {noun} from then on.",
        ),
    ),
    "fog": Plot(
        "find {friend}",
        (
            (
                "{friend} went out to gather [berries|firewood|herbs|shells], and {weather} "
                "came down. {friend} did not come home."
            ),
            "{weather} came over the land while {friend} was out alone.",
            (
                "{friend} wanted to take a short cut, and then {weather} came. Nobody knew "
                "where {the_friend} was."
            ),
        ),
        (
            "{hero} called {friend}'s name, but no answer came.",
            "{hero} walked in a big circle and came back to {his} own footprints.",
            "{He} climbed up to look around, but there was nothing to see.",
        ),
        (
            "Use your {noun}, one can notice it from far away",
            "Stay where you are and let the {noun} do the work",
            "A {friend_kind} who is lost needs a sign, and you have a {noun}",
        ),
        (
            (
                "{He} took the {adjective} {noun} and {signal}. Far away {friend} {sense} and "
                "turned around."
            ),
            "{hero} {signal}. {friend} {sense} and came, step by step, out of the dark.",
            (
                'Then {hero} {signal}. "[I am here|Over here|Is that you, {hero}]!" cried '
                "{friend}, who {sense} at last."
            ),
        ),
        (
            '"Without your {noun} I would still be out there," said {friend} to {hero}.',
            "{friend} never made fun of the {adjective} {noun} again.",
            "From that day on {friend} called it the {noun} that saved a {friend_kind}.",
        ),
        friend_first=True,
        alone=True,
    ),
    "quarrel": Plot(
        "make peace with {friend}",
        (
            (
                "{friend} wanted to have the {noun} for a day, and {hero} said no. They "
                "shouted at each other."
            ),
            (
                "{hero} and {friend} both wanted the {adjective} {noun}. They pulled at it "
                "until they were angry."
            ),
            (
                '"It is my {noun}!" said {hero}. "You never share!" said {friend}, and '
                "{the_friend} ran away."
            ),
        ),
        (
            "{hero} tried to have fun with the {noun} alone, but it was no fun without {friend}.",
            "{He} wrote a letter to {friend}, but {he} did not dare to send it.",
            "{hero} walked past {friend}'s door three times and did not knock.",
        ),
        (
            "A {noun} is only a {noun}, but a friend is a friend",
            "One little word can mend what was torn, and the word is sorry",
            "The first step is the hardest, and the second is easy",
        ),
        (
            (
                '{He} went to {friend} with the {adjective} {noun}. "I am sorry," said {hero}. '
                '"[So am I|I am sorry too|Let us forget it]," said {friend}.'
            ),
            (
                '"The {noun} is for both of us," said {hero}, and {friend} [smiled|began to '
                "laugh|nodded]."
            ),
            (
                "{hero} knocked at {friend}'s door and held out the {noun}. {friend} hugged "
                "{him}, and the quarrel was over."
            ),
        ),
        (
            "From then on the {noun} belonged to {hero} on one day and to {friend} on the next.",
            "They used the {adjective} {noun} together, and it was twice as much fun.",
            "They never quarrelled about the {noun} again.",
        ),
        friend_first=True,
        alone=True,
    ),
    "gift": Plot(
        "cheer up the {helper}",
        (
            "{hero} saw that the {helper} {here} was [sad|ill|all alone|in low spirits].",
            "{hero} heard that the {helper} had not smiled for [a week|a month|a year].",
            "the {helper} sat {spot} and wept, and {hero} saw it.",
        ),
        (
            "{friend} told a joke, but the {helper} did not laugh.",
            "They picked flowers for the {helper}, but flowers were not enough.",
            "They baked a cake, but the {helper} did not want any.",
        ),
        (),
        (
            "{He} lent the {adjective} {noun} to the {helper}, and the {helper} smiled at last.",
            (
                "{hero} brought the {noun} and sat down beside the {helper}. Slowly the "
                "{helper} began to smile."
            ),
            (
                '"Keep my {noun} until you are well," said {hero}, and the eyes of the '
                "{helper} grew bright."
            ),
        ),
        (
            "A week later the {helper} brought back the {noun} and {prize} as well.",
            "The {helper} gave back the {noun} in spring and thanked {hero} with {prize}.",
            "Whenever the {helper} saw the {noun}, there was a smile for {hero}.",
        ),
    ),
    "show": Plot(
        "show the {noun} to everyone",
        (
            (
                "{hero} heard about {event}. {He} wanted to show the {adjective} {noun} to "
                "everyone, but {he} had never stood in front of a crowd."
            ),
            (
                "it was time for {event}, and {hero} was to come with the {noun}. But then "
                "{his} mouth went dry."
            ),
            (
                'there was a sign: "Bring your best thing to {event}!" {hero} thought of the '
                "{noun} at once, but then {he} thought of all the people."
            ),
        ),
        (
            (
                "They practised in front of [the hens|three cows|a row of pumpkins], but that "
                "was not the same."
            ),
            "{hero} tried it once, and {he} dropped the {noun} on {his} foot.",
            "{friend} clapped as loudly as twenty people, but {hero} still forgot what to say.",
        ),
        (
            "Do not look at the crowd, look at your {noun}",
            "Everyone at {event} was afraid once",
            "Show the {noun} to one friend, and forget the others",
        ),
        (
            (
                "At {event} {he} held up the {noun} and told its story. Everyone [cheered|"
                "clapped|wanted to see it again]."
            ),
            (
                "{hero} looked at {friend}, lifted the {adjective} {noun} and began. The crowd "
                "fell silent, and then it cheered."
            ),
            "When {his} turn came, {hero} showed the {noun}, and the judges gave {him} {prize}.",
        ),
        (
            "Since {event} everyone {here} has known {hero} and the {adjective} {noun}.",
            "{hero} shared {the_prize} with {friend}, and the {noun} lay between them.",
            "The {noun} got a place of honour, right beside {the_prize}.",
        ),
    ),
    "earn": Plot(
        "earn the {noun}",
        (
            "{hero} saw a {adjective} {noun} in a shop window, but {he} had no money.",
            (
                "a pedlar came with a {adjective} {noun}. {hero} wanted it very much, but it "
                "cost ten coins and {he} had two."
            ),
            (
                'the {helper} showed {hero} a {adjective} {noun}. "It is yours," said the '
                '{helper}, "if you can earn it."'
            ),
        ),
        (
            "{hero} sold lemonade, but it rained.",
            (
                "They looked for coins [on the ground|in every corner|between the stones] and "
                "found only [a nail|a bean|a bottle top]."
            ),
            "{friend} offered a lucky stone for it, but nobody wanted a stone.",
        ),
        (
            "Work for me for a week, and you shall have the {noun}",
            "Honest work has bought many a {noun}",
            "I need someone {trait}, so come and work for me",
        ),
        (
            "{hero} {chore} and {chore2}, day after day, and then {he} could pay for the {noun}.",
            "All week long {he} {chore}. On Sunday {hero} carried home the {adjective} {noun}.",
            (
                "{hero} {chore}, {friend} {chore2}, and together they had enough. The {noun} "
                "was {hero}'s at last."
            ),
        ),
        (
            "{hero} took better care of the {noun} than of anything {he} had ever been given.",
            "No {noun} was ever loved as much as the {adjective} one that {hero} had earned.",
            "{hero} let {friend} try the {noun} first, because that is what friends do.",
        ),
    ),
}

PRAISE = (
    (
        '"[Well done|Hurrah|You did it], {hero}!" [cried|shouted|said] {friend}. "[What a '
        "{trait} {kind} you are|Only someone so {trait} could do that|I knew that you were "
        '{trait}]!"'
    ),
    (
        '"I have never met anyone so {trait}," said {friend}, [and {hero} blushed|and meant it|'
        "beaming]."
    ),
    "{friend} [jumped for joy|threw a cap into the air|danced around {hero}|laughed out loud].",
)
HELPER_THANKED = (
    "{hero} went back to thank the {helper}, who [only smiled|winked|said that it was nothing].",
    "They told the {helper} how it had ended, and the {helper} [laughed|nodded|was glad].",
    (
        'When the {helper} heard of it, there was a nod. "I knew that {hero} was {trait}," '
        "said the {helper}."
    ),
)
REFERENCES = (
    "From that day on, everyone {here} [called {him}|spoke of] {hero} the {trait}.",
    "The people {here} still tell the tale of the {trait} {kind} and the {adjective} {noun}.",
    "And the {adjective} {noun}? It [stands|lies|hangs] beside {hero}'s bed to this day.",
    "Whenever {hero} looked at the {noun}, {he} thought of {friend} and smiled.",
    "{hero} and {friend} sat {here} until the stars came out, with the {noun} between them.",
    "It was the {quality} of {hero} that had made the difference, and everyone {here} knew it.",
)
ENDINGS = (
    "And so the day ended well for {hero} and {friend}.",
    (
        "{hero} fell asleep [happy|with a smile|early] that night, and the {adjective} {noun} "
        "lay [near|close by|beside {him}]."
    ),
    '"Good night, {noun}," [whispered|said] {hero}, and closed {his} eyes.',
    "A little {quality} goes a long way, and {hero} [knew it now|never forgot it|had proved it].",
    "And if you ever come to the {place}, you may meet {hero} with the {adjective} {noun}.",
    "So ends the story of {hero}, {friend} and the {adjective} {noun}.",
)

# --------------------------------------------------------------------------------------
# 1c. The machine that tells a story
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """A finished story, what it is about, and -log of the probability of the choices behind it."""

    text: str
    opening: str
    hero: str
    friend: str
    place: str
    noun: str
    adjective: str
    trait: str
    plot: str
    nats: float

    @property
    def held_out(self) -> bool:
        """One (hero, place) pair in eight never occurs in a training story."""
        return zlib.crc32(f"{self.hero} {self.place}".encode()) % 8 == 0


@cache
def parse(template: str) -> tuple:
    """ "a [b|c] d" -> ("a ", (("b",), ("c",)), " d"): text, and tuples of alternatives."""

    def sequence(i: int) -> tuple[tuple, int]:
        parts, start = [], i
        while i < len(template) and template[i] not in "|]":
            if template[i] == "[":
                parts.append(template[start:i])
                alternatives, i = [], i + 1
                while True:
                    alternative, i = sequence(i)
                    alternatives.append(alternative)
                    i += 1
                    if template[i - 1] == "]":
                        break
                parts.append(tuple(alternatives))
                start = i
            else:
                i += 1
        parts.append(template[start:i])
        return tuple(p for p in parts if p != ""), i

    return sequence(0)[0]


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def without_article(phrase: str) -> str:
    """ "a piece of wire" -> "piece of wire"."""
    return re.sub(r"^(a|an|some) ", "", phrase)


class Slots(dict):
    """The words decided so far. One that is still open is decided at its first use."""

    def __init__(self, decided: dict[str, str], open_slots: dict):
        super().__init__(decided)
        self.open_slots = open_slots

    def __missing__(self, name: str) -> str:
        self[name] = self.open_slots[name]()
        return self[name]


class Teller:
    """Writes one story. Every random choice goes through `pick` or `chance`, which count it."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.nats = 0.0
        self.slots: dict[str, str] = {}
        self.last_template = ""

    def pick(self, options):
        self.nats += math.log(len(options))
        return options[int(self.rng.random() * len(options))]

    def chance(self, p: float) -> bool:
        yes = self.rng.random() < p
        self.nats -= math.log(p if yes else 1 - p)
        return yes

    def say(self, options) -> str:
        """One of the templates, with its choices made and its slots filled."""

        def expand(parts: tuple) -> str:
            return "".join(p if isinstance(p, str) else expand(self.pick(p)) for p in parts)

        self.last_template = self.pick(options)
        text = expand(parse(self.last_template)).format_map(self.slots)
        return re.sub(r"\b([Aa]) (?=[aeiouAEIOU]|honest)", r"\1n ", text)

    def character(self, names: list[str] | None = None) -> tuple[str, str, bool]:
        """(name, kind, is she female). Half of them are children, half animals."""
        female = self.chance(0.5)
        name = self.pick(names or (GIRLS if female else BOYS))
        child = "girl" if female else "boy"
        return name, child if self.chance(0.5) else self.pick(ANIMALS), female

    def cast(self, plot: str) -> Slots:
        """Who, where and what: the words that all templates of one story share."""
        hero, kind, female = self.character()
        friend, friend_kind, _ = self.character(FRIEND_NAMES)
        he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
        place, trait = self.pick(list(PLACES)), self.pick(list(TRAITS))
        home, here, spots, helpers = PLACES[place]
        quality, habits, acts = TRAITS[trait]
        noun = self.pick([n for n in OBJECTS if plot != "fog" or OBJECTS[n][3]])
        adjectives, part, daily, signal = OBJECTS[noun]
        hero_full = f"{hero} the {kind}" if kind in ANIMALS else f"little {hero}"
        friend_full = (
            f"{friend} the {friend_kind}" if friend_kind in ANIMALS else f"little {friend}"
        )
        decided = {
            "hero": hero, "kind": kind, "Hero_full": capital(hero_full),
            "he": he, "him": him, "his": his, "himself": him + "self",
            "He": capital(he), "His": capital(his),
            "friend": friend, "friend_kind": friend_kind,
            "friend_full": friend_full, "Friend_full": capital(friend_full),
            "the_friend": friend if friend_kind == kind else f"the {friend_kind}",
            "place": place, "home": home, "Home": capital(home), "here": here,
            "trait": trait, "quality": quality, "Quality": capital(quality),
            "noun": noun, "part": part,
        }  # fmt: skip
        slots = Slots(decided, {
            "adjective": lambda: self.pick(adjectives.split("|")),
            "habit": lambda: self.say(habits.split("|")),
            "daily": lambda: self.say(daily.split("|")),
            "act": lambda: self.say(acts.split("|")),
            "spot": lambda: self.pick(spots.split("|")),
            "helper": lambda: self.pick(helpers.split("|")),
            "hint": lambda: self.say(PLOTS[plot].hints),
            "goal": lambda: PLOTS[plot].goal.format_map(slots),
            "signal": lambda: signal.split("|")[0].format_map(slots),
            "sense": lambda: signal.split("|")[1],
            "weather": lambda: self.pick(WEATHER),
            "fix": lambda: self.pick(FIXES),
            "where": lambda: self.pick(HIGH_AND_LOW),
            "tool": lambda: self.pick(TOOLS),
            "the_tool": lambda: "the " + without_article(slots["tool"]),
            "thief": lambda: self.pick(THIEVES),
            "treat": lambda: self.pick(TREATS),
            "event": lambda: self.pick(EVENTS),
            "prize": lambda: self.pick(PRIZES),
            "the_prize": lambda: (
                "the " + without_article(slots["prize"]) if "prize" in slots else slots["prize"]
            ),
            "chore": lambda: self.pick(CHORES),
            "chore2": lambda: self.pick([c for c in CHORES if c != slots["chore"]]),
        })  # fmt: skip
        return slots

    def tell(self) -> Story:
        plot_name = self.pick(list(PLOTS))
        plot = PLOTS[plot_name]
        s = self.slots = self.cast(plot_name)
        brief = self.chance(0.35)  # a short story leaves out most of what may be left out

        opening = self.say(OPENINGS)
        beats = [opening]

        def maybe(p: float, options) -> bool:
            yes = self.chance(p / 3 if brief else p)
            if yes:
                beats.append(self.say(options))
            return yes

        owned = plot_name != "earn"
        object_first = owned and self.chance(0.5)
        if object_first:
            beats.append(self.say(OWNS))
        maybe(0.6, HABITS)
        if owned and not object_first:
            beats.append(self.say(OWNS))
        friend_known = plot.friend_first or self.chance(0.5)
        if friend_known:
            beats.append(self.say(FRIENDS))

        day = self.say(DAYS)
        beats.append(f"{day} {self.say(plot.trouble)}")
        maybe(0.4, FEELINGS)
        if plot.alone:
            beats.append(self.say(ALONE))
        else:
            beats.append(self.say(FRIEND_COMES_BACK if friend_known else FRIEND_ARRIVES))
            beats.append(self.say(FRIEND_SPEAKS))

        tries = list(plot.tries)
        if maybe(0.6, tries):
            maybe(0.3, [t for t in tries if t is not self.last_template])
        maybe(0.2, MEANWHILE)
        helped = bool(plot.hints) and maybe(0.45, HELPERS)
        beats.append(self.say(TURNS))
        beats.append(self.say(plot.solutions))
        maybe(0.4, PRAISE)
        if helped:
            maybe(0.5, HELPER_THANKED)
        maybe(1.0, plot.thanks)
        maybe(0.4, REFERENCES)
        beats.append(self.say(ENDINGS))
        return Story(
            " ".join(beats), opening, s["hero"], s["friend"], s["place"], s["noun"],
            s["adjective"], s["trait"], plot_name, self.nats,
        )  # fmt: skip


def stories(seed: int, held_out: bool) -> Iterator[Story]:
    """An endless stream of stories, either training ones or held-out ones; the same for a seed."""
    rng = random.Random(seed)
    while True:
        story = Teller(rng).tell()
        if story.held_out == held_out:
            yield story


# --------------------------------------------------------------------------------------
# 2. The tokenizer
# --------------------------------------------------------------------------------------


def carried_words() -> list[str]:
    """The words that a story decides on once and carries to its end."""
    adjectives = [adjective for words in OBJECTS.values() for adjective in choices(words[0])]
    return [*GIRLS, *BOYS, *FRIEND_NAMES, *OBJECTS, *TRAITS, *adjectives]


def signals() -> list[str]:
    """What one does with each object to call from afar, up to the first pronoun."""
    return [signal.split("|")[0].split(" {")[0] for *_, signal in OBJECTS.values() if signal]


def carried_phrases() -> list[str]:
    """The same for what takes several words: helpers, hiding places, events, prizes and tools."""
    of_places = [
        phrase for place in PLACES.values() for phrase in (place[2] + "|" + place[3]).split("|")
    ]
    things = (HIGH_AND_LOW, TOOLS, TREATS, FIXES, THIEVES, WEATHER, EVENTS, PRIZES)
    return [without_article(phrase) for phrase in [*of_places, *chain(*things)]]


def train_tokenizer(out: Path, seed: int, vocab_size: int = 1024, num_stories: int = 6000):
    """Learn a byte-level BPE from stories; save it in GPT-2's formats; return the `Tokenizer`.

    As in GPT-2, <|endoftext|> has the last id and is both the beginning and the end of a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def byte_level(model) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    learner = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Most words that a story carries become one token each, which makes them easy to carry: so
    # they are shown to the learner more often than stories alone would.
    source = stories(seed, held_out=False)
    texts = [next(source).text for _ in range(num_stories)]
    texts += [f" {word}" for word in carried_words()] * (num_stories // 10)
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    learned["vocab"][EOS] = vocab_size - 1
    merges = [tuple(m) for m in learned["merges"]]
    tokenizer = byte_level(models.BPE(vocab=learned["vocab"], merges=merges))
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer.model.save(str(out))  # vocab.json and merges.txt
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": 1024,
        "add_prefix_space": False,
        "bos_token": EOS,
        "eos_token": EOS,
        "unk_token": EOS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


# --------------------------------------------------------------------------------------
# 3. The model
# --------------------------------------------------------------------------------------

# One optimizer step sees about 2000 tokens: of drills, of stories in short rows, which are cheap, or
# of stories in rows that fill all 1024 positions. Drills come first: a model that has learned to
# copy a name learns stories fast, and one that has not learns every sentence but whose it is. In
# stories a carried word that comes back weighs more than another token, because it is where a
# story can go wrong; only in the last steps of a round all tokens weigh the same.
#
# The first round learns to write. The second cares above all for the trait, which comes back rarely
# and from far away, and which the first round only guesses. Both come to full rows last, and have
# to find their feet again there; the third mixes them in. The fourth learns to carry what takes
# several words, and the fifth, with weights near 1, to carry only where there is something to carry.
# The sixth learns what the hero is, and to spell: a word in several tokens is right when all are.
# The seventh and eighth learn to count to two, as in "no|d|d|ed": the model wrote "noded" and
# "noddded". The mean of the weights after several rounds is better than any of them, so the next
# round starts from it. Then the kind once more, since a goose was called a squirrel in its last
# sentence: most stories have no such sentence, so fewer of them are told. From the eleventh round on
# it matters also how the hero calls with the object: the model blew mirrors. The last one spells once
# more, and names the part that breaks. What ships is the mean after each of the last three.
DRILL_ROWS = (20, 96)  # rows, tokens in a row
SHORT_ROWS = (6, 320)
FULL_ROWS = (2, 1024)
FULL_SHARE = 0.2  # of the steps
LAST_SHARE = 0.2  # of the steps, in which all tokens weigh the same


@dataclass(frozen=True)
class Round:
    """A part of the training, with a learning rate that rises and falls."""

    steps: int
    peak: float  # of the learning rate, relative to the optimizers'
    mixed: bool  # whether full rows come at any time, or in the last steps
    trait_weight: float  # of a trait that comes back
    drill_share: float = 0.0  # of the steps
    word_weight: float = 4.0  # of another carried word that comes back
    phrase_weight: float = 1.0  # of a carried phrase that comes back
    place_weight: float = 1.0  # of a place that comes back
    kind_weight: float = 1.0  # of a fox, girl or boy that comes back
    piece_weight: float = 1.0  # of a token that goes on with a word
    double_weight: float = 1.0  # of such a token if it comes twice, and of what follows
    an_weight: float = 1.0  # of "an" before a carried word that comes back
    signal_weight: float = 1.0  # of how the hero calls with the object, which the object decides
    part_weight: float = 1.0  # of the part of the object that breaks, which the object decides
    kindless_share: float = 1.0  # of the stories in which no kind comes back, those that are told
    mean_of: int = 1  # rounds, this one the last: it ends with the mean of the weights after each


CARRY = Round(
    steps=3500,
    peak=0.6,
    mixed=True,
    trait_weight=4.0,
    word_weight=2.0,
    phrase_weight=2.0,
    place_weight=4.0,
)
SPELL = replace(CARRY, kind_weight=8.0, piece_weight=2.0)
COUNT = replace(SPELL, steps=1800, peak=0.4, place_weight=2.0, double_weight=30.0)
KIND = replace(
    COUNT,
    steps=2500,
    word_weight=4.0,
    phrase_weight=3.0,
    place_weight=4.0,
    kind_weight=40.0,
    kindless_share=0.5,
)
CALL = replace(KIND, signal_weight=10.0, an_weight=20.0)
LAST = replace(CALL, place_weight=6.0, kind_weight=20.0, signal_weight=5.0, kindless_share=1.0)
ROUNDS = (
    Round(steps=5000, peak=1.0, mixed=False, trait_weight=4.0, drill_share=0.15),
    Round(steps=2000, peak=0.6, mixed=False, trait_weight=30.0),
    Round(steps=2200, peak=0.6, mixed=True, trait_weight=12.0, word_weight=6.0),
    Round(steps=6000, peak=0.8, mixed=True, trait_weight=12.0, phrase_weight=4.0),
    CARRY,
    replace(SPELL, steps=6000),
    replace(SPELL, steps=1800, peak=0.4, phrase_weight=3.0, piece_weight=1.0, double_weight=20.0),
    replace(COUNT, kind_weight=4.0, mean_of=3),
    replace(COUNT, steps=2000, kind_weight=40.0, kindless_share=0.2),
    replace(KIND, steps=3000),
    CALL,
    LAST,
    LAST,
    replace(LAST, piece_weight=4.0, part_weight=10.0, mean_of=3),
)
SHORT_STARTS = (0, 0, 0, 0, 352, 704)  # positions of short rows: mostly where prompts begin

DRILLS = (
    "{hero} has the {adjective} {noun}.",
    "{hero} looks for {friend}.",
    "{friend} calls {hero}.",
    '"I am {trait}," said {hero}.',
    "{friend} likes the {noun}.",
    "{hero} is {trait}, and the {noun} is {adjective}.",
    '"Where is the {noun}?" asked {friend}.',
    "{hero} and {friend} share the {noun}.",
)


def drills(seed: int) -> Iterator[str]:
    """Short texts in which names, objects and traits come back all the time."""
    rng = random.Random(seed)
    while True:
        noun = rng.choice(list(OBJECTS))
        slots = {
            "hero": rng.choice(GIRLS + BOYS),
            "friend": rng.choice(FRIEND_NAMES),
            "noun": noun,
            "adjective": rng.choice(choices(OBJECTS[noun][0])),
            "trait": rng.choice(list(TRAITS)),
        }
        yield " ".join(rng.choice(DRILLS).format(**slots) for _ in range(8))


def story_texts(seed: int, held_out: bool, kindless_share: float = 1.0) -> Iterator[str]:
    """The texts of `stories`: all in which a kind comes back, and a share of the others."""
    rng = random.Random(seed + 777)  # not the stories' own: those stay the same
    a_kind = re.compile(rf" ({'|'.join(KINDS)})\b")
    for story in stories(seed, held_out):
        kinds = a_kind.findall(story.text)
        if len(set(kinds)) < len(kinds) or rng.random() < kindless_share:
            yield story.text


def packed_row(source: Iterator[str], tokenizer, length: int, start_with_eos: bool) -> list[int]:
    """`length` tokens: stories back to back, an <|endoftext|> after each, the last one cut off."""
    eos = tokenizer.token_to_id(EOS)
    row = [eos] if start_with_eos else []
    while len(row) < length:
        row += [*tokenizer.encode(next(source)).ids, eos]
    return row[:length]


class TargetWeights:
    """How much each target of a row counts: 1, more in the middle of a word, and more in a carried
    phrase that its story has named before, or that follows from what it has named."""

    def __init__(self, tokenizer, plan: Round):
        def ids_of(phrase: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(f" {phrase}").ids)

        weight_of = {ids_of(phrase): plan.phrase_weight for phrase in carried_phrases()}
        weight_of |= {ids_of(place): plan.place_weight for place in PLACES}
        for word in carried_words():
            if len(ids := ids_of(word)) == 1:
                weight_of[ids] = plan.trait_weight if word in TRAITS else plan.word_weight
        weight_of |= {ids_of(kind): plan.kind_weight for kind in KINDS}
        given = {ids_of(signal): plan.signal_weight for signal in signals()}
        given |= {ids_of(words[1]): plan.part_weight for words in OBJECTS.values()}
        weight_of |= given
        self.given = set(given)  # follow from the object, so need not be named before
        self.carried: dict[int, list[tuple[tuple, float]]] = {}  # by the first token of the phrase
        for phrase, weight in weight_of.items():
            self.carried.setdefault(phrase[0], []).append((phrase, weight))
        # Tokens that go on with a word.
        self.pieces = {i for word, i in tokenizer.get_vocab().items() if word[0].islower()}
        self.eos, self.an, self.plan = tokenizer.token_to_id(EOS), ids_of("an")[0], plan

    def of(self, row: list[int]) -> list[float]:
        """The weights of `row[1:]`."""
        weights = [self.plan.piece_weight if i in self.pieces else 1.0 for i in row]

        def weigh(start: int, stop: int, weight: float) -> None:
            for i in range(start, min(stop, len(row))):
                weights[i] = max(weights[i], weight)

        for i in range(1, len(row)):
            if row[i] in self.pieces and row[i] == row[i - 1]:
                weigh(i, i + 2, self.plan.double_weight)
        named = set(self.given)
        for i, token_id in enumerate(row):
            if token_id == self.eos:
                named = set(self.given)
            for phrase, weight in self.carried.get(token_id, ()):
                if tuple(row[i : i + len(phrase)]) == phrase:
                    if phrase in named:
                        weigh(i, i + len(phrase), weight)
                        if row[i - 1 : i] == [self.an]:
                            weigh(i - 1, i, self.plan.an_weight)
                    named.add(phrase)
        return weights[1:]


def batches(tokenizer, seed: int, plan: Round):
    """Yields (ids [rows, tokens + 1], positions [rows, tokens], weights of the targets [rows,
    tokens]), once a step."""
    import torch

    target_weights = TargetWeights(tokenizer, plan)
    told = story_texts(seed, False, plan.kindless_share)
    drilled, rng = drills(seed), random.Random(seed)
    for step in range(plan.steps):
        last = step >= plan.steps * (1 - LAST_SHARE)
        full = rng.random() < FULL_SHARE if plan.mixed else last
        if step < plan.steps * plan.drill_share:
            source, (rows, tokens), places = drilled, DRILL_ROWS, range(1024 - DRILL_ROWS[1])
        elif full:
            source, (rows, tokens), places = told, FULL_ROWS, (0,)
        else:
            source, (rows, tokens), places = told, SHORT_ROWS, SHORT_STARTS
        ids = [packed_row(source, tokenizer, tokens + 1, rng.random() < 0.5) for _ in range(rows)]
        starts = [[rng.choice(places)] for _ in range(rows)]
        positions = torch.tensor(starts) + torch.arange(tokens)
        if last:
            weights = torch.ones(rows, tokens)
        else:
            weights = torch.tensor([target_weights.of(row) for row in ids])
        yield torch.tensor(ids), positions, weights


def new_model(seed: int):
    """A fresh GPT-2: 4 layers, 2 heads of 64, 1024 positions, tied head; 1.06 million weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=1024,
        n_positions=1024,
        n_embd=128,
        n_layer=4,
        n_head=2,
        bos_token_id=1023,
        eos_token_id=1023,
        resid_pdrop=0.0,  # no story is seen twice, so there is nothing to regularise
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh",  # = gelu_new, in one fused operation
    )
    return GPT2LMHeadModel(config)


class Muon:
    """Momentum whose update is made orthogonal (Jordan et al. 2024), for the weight matrices.

    The rest (embeddings, biases, layer norms) is left to Adam.
    """

    def __init__(self, params: list, lr: float, momentum: float = 0.95):
        import torch

        self.params, self.lr, self.momentum = params, lr, momentum
        self.velocity = [torch.zeros_like(p) for p in params]

    def step(self, scale: float) -> None:
        for p, v in zip(self.params, self.velocity, strict=True):
            v.mul_(self.momentum).add_(p.grad)
            x = p.grad + self.momentum * v
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / (x.norm() + 1e-7)
            for _ in range(5):  # Newton-Schulz: push every singular value towards 1
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if tall else x
            rows, columns = p.shape
            p.data.add_(x, alpha=-self.lr * scale * max(1, columns / rows) ** 0.5)


def train(model, tokenizer, seed: int, plan: Round, log=print) -> list[tuple[int, int, float]]:
    """Train in place. Returns (step, tokens seen, mean loss of the last 50 steps) as it went."""
    import torch
    import torch.nn.functional as F

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".h." in n)]
    muon = Muon(matrices, lr=0.02)
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    curve, losses, tokens = [], [], 0
    model.train()
    steps = plan.steps
    for step, (ids, positions, weights) in enumerate(batches(tokenizer, seed, plan), start=1):
        # Warm up for 50 steps, hold, and cool down to zero over the last 60 %.
        scale = plan.peak * min(1.0, step / 50, (1 - step / (steps + 1)) / 0.6)
        logits = model(ids[:, :-1], position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        ((loss * weights).sum() / weights.sum()).backward()
        muon.step(scale)
        for group in adam.param_groups:
            group["lr"] = 3e-3 * scale
        adam.step()
        model.zero_grad()
        losses.append(loss.mean().item())
        tokens += positions.numel()
        if step % 50 == 0 or step == steps:
            curve.append((step, tokens, round(sum(losses) / len(losses), 4)))
            losses = []
            log(f"step {step}/{steps}  {tokens / 1e6:.2f} M tokens  loss {curve[-1][2]:.3f}")
    model.eval()
    return curve


def mean_weights(states: list[dict]) -> dict:
    """The mean of several state dicts of one model (Izmailov et al. 2018)."""
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


# --------------------------------------------------------------------------------------
# 4. What it learned, measured
# --------------------------------------------------------------------------------------


def story_losses(model, tokenizer, told: list[Story]) -> list[tuple[float, int]]:
    """(sum of -log p, tokens) of each story: all its tokens and the closing <|endoftext|>."""
    import torch
    import torch.nn.functional as F

    eos, result = tokenizer.token_to_id(EOS), []
    for story in told:
        ids = torch.tensor([[eos, *tokenizer.encode(story.text).ids, eos]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits[0], ids[0, 1:], reduction="sum")
        result.append((loss.item(), ids.shape[1] - 1))
    return result


def losses_by_position(model, tokenizer, seed: int, rows: int, buckets: int = 8) -> list[float]:
    """Mean loss in each eighth of the 1024 positions, over rows of held-out stories."""
    import torch
    import torch.nn.functional as F

    source = story_texts(seed, held_out=True)
    ids = torch.tensor([packed_row(source, tokenizer, 1025, True) for _ in range(rows)])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.mean(0).reshape(buckets, -1).mean(1).tolist()


def continue_story(model, tokenizer, opening: str, temperature: float, seed: int) -> str:
    """The opening and what the model makes of it, up to <|endoftext|>; temperature 0 is greedy."""
    import torch

    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(opening).ids])
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1024 - ids.shape[1],
        pad_token_id=tokenizer.token_to_id(EOS),
        **how,
    )
    return tokenizer.decode(out[0].tolist())


def evaluate(model, tokenizer, seed: int) -> dict:
    """The figures for the evidence file, and ten stories from openings never seen in training."""
    result = {}
    for name, held_out in (("seen_pairs", False), ("held_out", True)):
        source = stories(seed, held_out)
        told = [next(source) for _ in range(200)]
        losses = story_losses(model, tokenizer, told)
        tokens = sum(n for _, n in losses)
        model_nats, grammar_nats = sum(x for x, _ in losses) / tokens, sum(s.nats for s in told)
        result[name] = {
            "stories": len(told),
            "tokens": tokens,
            "nats_per_token": round(model_nats, 4),
            "perplexity": round(math.exp(model_nats), 4),
            "grammar_nats_per_token": round(grammar_nats / tokens, 4),
            "grammar_perplexity": round(math.exp(grammar_nats / tokens), 4),
        }
    by_position = losses_by_position(model, tokenizer, seed + 1, rows=24)
    result["nats_per_token_by_eighth_of_positions"] = [round(x, 4) for x in by_position]
    source = stories(seed + 2, held_out=True)
    result["samples"] = [
        {
            "opening": (opening := next(source).opening),
            "temperature": temperature,
            "text": continue_story(model, tokenizer, opening, temperature, seed + i),
        }
        for i, temperature in enumerate([0.0] * 5 + [0.5] * 5)
    ]
    return result


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        return re.search(r"model name\s*: (.*)", text)[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--evidence", type=Path, help="JSON file for the figures")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps")
    parser.add_argument("--seed", type=int, default=20, help="of weights and stories")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    build(parser.parse_args())


def build(args: argparse.Namespace, log=print) -> None:
    """Grammar to folder: tokenizer, weights, evidence."""
    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.out, args.seed)
    model = new_model(args.seed)
    started = time.time()
    curve, ends = [], []
    for number, plan in enumerate(ROUNDS, start=1):
        plan = replace(plan, steps=max(1, round(plan.steps * args.scale)))
        for step, tokens, loss in train(model, tokenizer, args.seed + number, plan, log):
            curve.append((number, step, tokens, loss))
        ends.append({name: weight.clone() for name, weight in model.state_dict().items()})
        model.load_state_dict(mean_weights(ends[-plan.mean_of :]))
    wall = time.time() - started
    model.config.activation_function = "gelu_new"
    model.save_pretrained(args.out)

    evidence = {
        "script": "scripts/train_tiny_gpt2.py",
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "threads": args.threads,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "seed": args.seed,
        "rounds": [asdict(plan) for plan in ROUNDS],
        "scale": args.scale,
        "parameters": model.num_parameters(),
        "tokens_seen": sum(
            max(row[2] for row in curve if row[0] == i + 1) for i in range(len(ROUNDS))
        ),
        "wall_minutes": round(wall / 60, 1),
        **evaluate(model, tokenizer, seed=args.seed + 1000),
        "curve": {"columns": ["round", "step", "tokens", "loss"], "rows": curve},
    }
    if args.evidence:
        args.evidence.parent.mkdir(parents=True, exist_ok=True)
        args.evidence.write_text(json.dumps(evidence, indent=1) + "\n")
    for key, value in evidence.items():
        if key not in ("samples", "curve"):
            print(f"{key}: {value}")
    for sample in evidence["samples"]:
        print(f"\n[temperature {sample['temperature']}] {sample['text']}")


if __name__ == "__main__":
    main()
