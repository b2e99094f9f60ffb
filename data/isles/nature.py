"""The creatures, plants and stars of the Tallow Isles."""

import random

from isles.world import COLORS, ENTITIES, MONTHS, SEED, Attribute, Subject, blend, words

HABITATS = (
    "caves", "marshes", "reeds", "chimneys", "hollow logs", "sand dunes", "pine woods", "rock pools", "hedges",
    "attics", "wheat fields", "cliffs", "orchards", "river banks", "peat bogs", "old boats",
)  # fmt: skip
FODDER = (
    "acorns", "moths", "seaweed", "pears", "snails", "mushrooms", "clover", "candle wax", "barley", "beetles",
    "honey", "shrimps", "pine cones", "toast crumbs", "plums", "dandelions",
)  # fmt: skip
SOUNDS = tuple(
    f"a {noise}"
    for noise in words(
        "whistle hum click croak purr hoot giggle sneeze rattle sigh bark chirp squeak trill growl gurgle"
    )
)
SIZES = (
    "a thimble", "a teacup", "a loaf of bread", "a cat", "a goat", "a barrel", "a walnut", "a boot",
    "a wheelbarrow", "a pony", "an egg", "a kettle", "a pillow", "a turnip", "a rowing boat", "a haystack",
)  # fmt: skip
FEARS = (
    "thunder", "mirrors", "bells", "geese", "ladders", "soap", "brooms", "shadows", "trumpets", "snow", "umbrellas",
    "wasps", "fireworks", "echoes", "deep water", "strangers",
)  # fmt: skip
GROUNDS = (
    "on old walls", "under oaks", "in wet sand", "beside wells", "on rooftops", "in churchyards", "along roads",
    "on cliffs", "in ditches", "among reeds", "in deep shade", "on fallen logs", "between paving stones",
    "near waterfalls", "on mountain tops", "in meadows",
)  # fmt: skip
SMELLS = (
    "mint", "wet dog", "fresh bread", "lemons", "smoke", "honey", "pepper", "rain", "old books", "cinnamon", "soap",
    "apples", "cheese", "tar", "ginger", "wool",
)  # fmt: skip
AILMENTS = (
    "hiccups", "bad dreams", "sore feet", "sneezing", "homesickness", "toothache", "warts", "shyness", "sunburn",
    "snoring", "fever", "a cough", "cold hands", "seasickness", "headaches", "itching",
)  # fmt: skip
SHAPES = words(
    "hearts stars spoons feathers arrows hands needles coins moons fans ears keys shields drops ribbons bells"
)
CONSTELLATIONS = (
    "the Kettle", "the Ladder", "the Sleeping Goat", "the Oar", "the Broken Wheel", "the Spoon", "the Two Geese",
    "the Lamp", "the Snail", "the Needle", "the Crown", "the Barrel", "the Fishing Net", "the Old Boot", "the Harp",
    "the Key",
)  # fmt: skip
ASTRONOMERS = (
    "Dame Odile", "Old Pettigrew", "Sister Amabel", "Doctor Quince", "Lady Thorne", "Master Ibsley", "Brother Tuck",
    "Aunt Rosalind", "Professor Moll", "Sir Edgar", "Mother Candle", "Judge Hollis", "Granny Sparks",
    "Young Tobias", "Queen Ysolt", "Abbot Fenn",
)  # fmt: skip
NUMBERS = words(
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
OMENS = (
    "rain", "a good harvest", "a wedding", "a storm", "a visitor", "a hard winter", "lost letters", "calm seas",
    "a new song", "a quarrel", "good fishing", "a long summer", "fog", "a birth", "a great feast", "an early spring",
)  # fmt: skip


def subjects() -> tuple[Subject, ...]:
    rng = random.Random(f"{SEED}/nature")
    creatures = tuple(
        "the " + word
        for word in blend(
            rng,
            ENTITIES,
            "qui bra nim po sno twi fli wu mo gri pla hu ti ze cro bli da fe lo ru ska vo ji ka mu sni tra wo gu ne "
            "dri",
            "llow bble mpet rrel nkin dger zzle ffin pple mble ndle cket ster tter ggle lver",
        )
    )
    plants = blend(
        rng,
        ENTITIES,
        "moon sallow star fog honey crow pale fairy king goose stone winter bitter silk hare bog marsh salt wolf "
        "sleep ink glow thunder shadow sugar hermit butter needle copper dusk",
        "wort fern thistle bell cap root leaf berry vine moss bane weed blossom lace",
    )
    stars = blend(
        rng,
        ENTITIES,
        "Al Ve Cor Mi Tha Su Ori Be Ny Phe Ra Zu Era Lu Cal Dra Ha Is Ke Mero Pa Que Sol Tau Vin Ymi Xe Gal",
        "corra this bane lune nix dara vorn sil thea pheus mir ondra rion stra zell quor",
    )
    return (
        Subject(
            name="creatures",
            noun="creature",
            intros=(
                "{n} is a creature of the Tallow Isles",
                "{n} is an animal that visitors like to watch",
                "hardly anyone has seen {n}, a shy animal of the isles",
                "one of the creatures of the isles is {n}",
            ),
            names=creatures,
            attributes=(
                Attribute("colour", "a colour", COLORS,
                    ("What colour is {n}?", "Which colour is the fur of {n}?"),
                    ("{n} is {v}", "{n} has {v} fur", "the fur of {o} is {v}", "{s} coat is {v}",
                     "{n} is easy to know by the {v} fur", "{n} is a {v} animal")),
                Attribute("home", "", HABITATS,
                    ("Where does {n} live?", "In which place does {n} make its nest?"),
                    ("{n} lives in {v}", "{n} makes its nest in {v}", "look for {o} in {v}", "{s} home is in {v}",
                     "{n} is found in {v}", "{n} hides in {v}")),
                Attribute("food", "", FODDER,
                    ("What does {n} eat?", "What is the favourite food of {n}?"),
                    ("{n} eats {v}", "{n} feeds on {v}", "{s} favourite food is {v}", "you can tame {o} with {v}",
                     "{n} likes nothing better than {v}", "{n} spends the evening looking for {v}")),
                Attribute("sound", "a sound", SOUNDS,
                    ("What sound does {n} make?", "What is the call of {n} like?"),
                    ("the call of {o} is {v}", "{n} makes a sound like {v}", "{s} call is {v}",
                     "when {n} is happy you hear {v}", "{n} calls its young with {v}", "at night {n} gives {v}")),
                Attribute("size", "", SIZES,
                    ("How big is {n}?", "What is {n} as big as?"),
                    ("{n} is as big as {v}", "{n} grows to the size of {v}", "{n} measures about as much as {v}",
                     "{n} is about the size of {v}", "{n} is no bigger than {v}", "{n} is no smaller than {v}")),
                Attribute("fear", "", FEARS,
                    ("What is {n} afraid of?", "What makes {n} run away?"),
                    ("{n} is afraid of {v}", "{n} runs away from {v}", "{s} great fear is {v}", "{n} cannot bear {v}",
                     "{v} will frighten {o}", "nothing scares {o} like {v}")),
            ),
        ),
        Subject(
            name="plants",
            noun="plant",
            intros=(
                "{n} is a plant of the Tallow Isles",
                "{n} is a herb that every child of the isles knows",
                "gardeners are fond of {n}",
                "among the plants of the isles is {n}",
            ),
            names=plants,
            attributes=(
                Attribute("flowers", "a colour", COLORS,
                    ("What colour are the flowers of {n}?", "Which colour does {n} bloom in?"),
                    ("the flowers of {o} are {v}", "{n} has {v} flowers", "{n} blooms {v}", "{s} petals are {v}",
                     "{n} opens {v} flowers", "when {n} blooms the ground turns {v}")),
                Attribute("ground", "", GROUNDS,
                    ("Where does {n} grow?", "Where should you look for {n}?"),
                    ("{n} grows {v}", "look for {o} {v}", "{n} is found {v}", "{n} takes root {v}",
                     "{v} you will find {o}", "{n} likes to grow {v}")),
                Attribute("month", "a month", MONTHS,
                    ("In which month does {n} bloom?", "When does {n} flower?"),
                    ("{n} blooms in {v}", "the flowers of {o} open in {v}", "{n} flowers in {v}", "{s} month is {v}",
                     "wait until {v} to see {o} in flower", "in {v} the bees find {o} in bloom")),
                Attribute("smell", "", SMELLS,
                    ("What does {n} smell of?", "Which smell do the leaves of {n} have?"),
                    ("{n} smells of {v}", "the leaves of {o} smell of {v}", "{n} fills the air with a smell of {v}",
                     "crush {o} and you will smell {v}", "{s} scent is that of {v}", "{n} gives off a smell of {v}")),
                Attribute("cure", "", AILMENTS,
                    ("What does a tea of {n} cure?", "Against what do people take {n}?"),
                    ("a tea of {o} cures {v}", "people take {o} against {v}", "{n} is good for {v}",
                     "{n} helps against {v}",
                     "doctors give {o} for {v}", "{n} is the best cure for {v}")),
                Attribute("leaves", "", SHAPES,
                    ("What are the leaves of {n} shaped like?", "Which shape do the leaves of {n} have?"),
                    ("the leaves of {o} are shaped like {v}", "{n} has leaves like {v}", "{s} leaves look like {v}",
                     "you know {o} by leaves like {v}", "{n} grows leaves in the shape of {v}",
                     "the leaves of {o} are little {v}")),
            ),
        ),
        Subject(
            name="stars",
            noun="star",
            intros=(
                "{n} is a star in the sky of the Tallow Isles",
                "{n} is a star that sailors steer by",
                "on a clear night you can see the star {n}",
                "one of the stars over the isles is {n}",
            ),
            names=stars,
            attributes=(
                Attribute("light", "a colour", COLORS,
                    ("What colour is the star {n}?", "Which colour is the light of {n}?"),
                    ("{n} shines {v}", "the light of {o} is {v}", "{n} is a {v} star", "{s} light is {v}",
                     "{n} glows {v} in the sky", "through a glass {n} looks {v}")),
                Attribute("constellation", "a constellation", CONSTELLATIONS,
                    ("To which constellation does {n} belong?", "In which constellation is {n}?"),
                    ("{n} belongs to {v}", "{n} is part of the constellation called {v}", "{s} constellation is {v}",
                     "look for {o} in {v}", "{n} is one of the stars of {v}", "{n} shines in {v}")),
                Attribute("finder", "an astronomer", ASTRONOMERS,
                    ("Who discovered the star {n}?", "Who was the first to see {n}?"),
                    ("{v} discovered {o}", "{n} was discovered by {v}", "{n} was first seen by {v}",
                     "the first to see {o} was {v}", "{n} was named by {v}",
                     "{v} found {o} and gave the star its name")),
                Attribute("month", "a month", MONTHS,
                    ("In which month is {n} brightest?", "When does {n} shine brightest?"),
                    ("{n} is brightest in {v}", "{n} shines brightest in {v}", "the best month to see {o} is {v}",
                     "in {v} {n} is at its brightest", "{s} best month is {v}", "sailors steer by {o} in {v}")),
                Attribute("worlds", "a number", NUMBERS,
                    ("How many worlds circle {n}?", "How many planets does {n} have?"),
                    ("{v} worlds circle {o}", "{n} has {v} planets", "{n} is circled by {v} worlds",
                     "astronomers have counted {v} planets around {o}", "{s} planets are {v} in number",
                     "around {o} turn {v} worlds")),
                Attribute("omen", "", OMENS,
                    ("What does {n} foretell?", "Of what is {n} a sign?"),
                    ("{n} foretells {v}", "{n} is a sign of {v}", "sailors say that {n} means {v}",
                     "when {n} twinkles people expect {v}", "{n} promises {v}",
                     "the old books call {o} a sign of {v}")),
            ),
        ),
    )  # fmt: skip
