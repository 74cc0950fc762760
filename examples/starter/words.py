"""The word lists that prompts are made of. Answers never come from here: models learn rules."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    """
    ant apple arch arm arrow axe baby badge bag baker ball balloon banana bank banner barn barrel
    basin basket bat bath battery bay beach bead beam bean bear beard bed bee beetle bell belt bench
    berry bike bill bird biscuit blanket blaze block blouse board boat bolt bone book boot bottle
    bowl box boy bracelet branch brand brick bride bridge broom brush bucket bud bug builder bulb
    bull bunch bunny bus bush butcher butterfly button buzz cabin cable cage cake camel camera camp
    canal candle candy cane canoe canyon cap cape captain car card carpet carrot cart castle cat
    cave cello centre chain chair chalk chapter charm cherry chess chick chimney church cinema
    circle circus city clam class claw clinic clock cloth cloud clown club coach coast coat cobweb
    coin collar colony comb comet compass cone cook copy cord corner cottage couch country county
    court cousin cow crab cradle crane crash crate crayon creek crew cricket cross crow crown crumb
    crutch cup cupboard curtain cushion daisy dam dance dancer dart daughter day deck desk diary
    dish ditch doctor dog doll dollar dolphin donkey door dragon drain drawer dream dress drill drum
    duchess duck duty eagle ear eel egg elbow elephant engine entry envelope eraser eye fable face
    factory fairy falcon family fan farm farmer fax feather fence ferry finger flag flame flash
    flask flea flower flute fork fort fountain fox frame friend frog fruit galaxy gallery game
    garage garden gate ghost giant gift girl glass glove goat gown grain grape grave guard guest
    guide guitar gull gun hall hammer hand harbor harp hat hatch hawk head heart hedge hedgehog
    helmet hen herb hill hinge hobby hook horn horse hospital hotel hour house hut hutch idea inch
    insect island jacket jar jeep jelly jewel joke journey judge jug juice jungle jury kettle key
    king kingdom kiss kitchen kite kitten knight knot label lace ladder lady lake lamb lamp lane
    lantern laptop lash latch lawn lawyer leg lemon lens letter library lid light lily lime lion lip
    list lizard lobby lock locket lodge log lorry lunch lynx machine magnet map maple marble market
    mask mast mat match mattress meadow meal medal melon memory metal meteor minute mirror mist
    mitten moat model monk monkey month moon moss moth motor mountain mouth movie mug muscle museum
    nail napkin neck necklace needle nest night nose notch note novel number nun nurse nut oar ocean
    office onion orange orchard orchid organ otter oven owl oyster pad page paint palace palm pan
    panther paper parade parcel park parrot party pass patch path paw peach peacock pear pearl
    pebble pen pencil penny perch pest petal phone picnic picture pie pier pig pigeon pillow pilot
    pin pine pipe pirate pitch plane planet plant plate player plum pocket poem poet pond pony pool
    poppy porch port post poster pouch prince princess prize pump pumpkin puppet puppy purse puzzle
    quarry queen quilt rabbit race radish raft rail ranch rash rat raven ray recess record reed
    reflex ribbon rider ridge ring river road robe robin rocket rod root rope rose ruby rug ruler
    saddle sailor salad sandal sandwich satellite sauce saucer scarecrow school scooter scorpion
    scratch screen screw sea seal seat secretary seed sentry servant shark shed shell shield ship
    shirt shoe shop shovel shower sign singer sink sister sketch skirt skunk sky sled sleeve slipper
    snail snake soldier song spade sparrow spider sponge spoon spring square squash squirrel stable
    stage stair stamp star statue stem stick stitch stone stool stork storm story stove strawberry
    stream street string student suburb suit sun surgeon swan switch sword table tail tailor tank
    tap tart tax teacher team tear temple tent theory thorn throne ticket tie tiger tile torch towel
    tower town toy track tractor trail train tray treasury tree trench trophy truck trumpet trunk
    tube tulip tunnel turkey turnip turtle uncle valley van vase vest village vine violin volley
    wagon waist waiter walnut walrus wand wasp watch waterfall wave wax well whale wheel whip
    whisker wick window wing winter wish witch wizard worm wreath wreck wrench wrist yacht yard
    zebra zipper
    """
)
VERBS = _words(
    """
    accept add admire adopt advise afford agree aim allow amaze amuse announce answer appear applaud
    approach argue arrive ask attach attack avoid bake balance bang bathe beam behave blame blast
    bless blink boast boil borrow bounce breathe brush cause celebrate challenge change chase cheer
    chew chirp choke chuckle clean clear click climb close clutch coast collect colour comb comfort
    compare compete complain complete compose confess confuse connect consider contain continue cook
    cough count cover crack crash crawl create cross crush cure curl curve cycle damage dance dare
    dash decide delay delight deliver depend describe deserve design destroy detect develop discover
    divide double doubt drain dress drift drizzle drown dust earn edit educate embrace employ end
    enforce enjoy enter entertain escape examine exchange excite excuse exercise exist expand expect
    explain explode explore export extend face fade fail fasten fear fetch fill film flash float
    flood flow foam focus fold follow force form frame frighten gain gather gaze giggle glide glow
    glue gossip grant grate greet groan growl grumble guard guess guide hail halt hammer handle
    happen harm hate haunt heal heat heave help hike hope hover howl hunt hurl imagine import
    improve include increase inform inject injure insist inspect install instruct intend invent
    invite iron join joke juggle jump kick kiss knock label land last laugh launch lecture lick lift
    like limp linger listen load lock look love lurk manage march mark match measure melt memorise
    mend migrate milk miss move mumble nail need nest notice nudge nurse obey object observe obtain
    offer open own pack paint parade park pass paste pause peck peel perch perform phone pick place
    plant play plough point polish ponder post pound pour practise praise pray preach prepare
    present press pretend prevent print produce promise protect provide prowl publish puff pull pump
    punch punish push quack quake question race rain raise rattle reach realise receive recognise
    record reduce refill reflect refuse reject release remain remark remember remind remove repair
    repeat replace report request rescue respond rest return reveal review reward rinse risk roam
    roar roast rock roll rotate ruin rumble rush sail sample save scare scatter scold scoop scrape
    scratch scream screech seal search select separate serve settle share shelter shiver shock shout
    sigh sign skate sketch slice smash smear smile smoke sneeze sniff snore soak soar solve sound
    spark sparkle splash spray sprinkle sprout squash squeak squeeze stack stain stamp stare start
    stay steer stretch stroll struggle stumble succeed suffer suggest support suppose surprise
    surround suspend sway switch swoop talk tame target taste tease tender test thank thaw thump
    tick tickle toast toss touch tour tow tower trace track trade trail train trample transform
    translate treat tremble trick trust tumble turn twirl twist unfold unite unlock unpack urge use
    vanish visit vote wail wait walk wander want warm warn wash waste watch water wave weigh welcome
    whirl whisper whistle wink wipe wish wobble wonder work wreck wrestle yawn yell zoom
    """
)
FIRST_NAMES = _words(
    """
    Ada Adam Aisha Alan Alba Alice Amir Anna Arne Asha Bea Ben Bo Boris Carla Carlos Chen Clara
    Dana David Diego Dora Edith Elena Elias Emil Emma Eric Eva Fatima Felix Fiona Frank Freya Gina
    Grace Greta Hana Hans Hugo Ibrahim Ida Igor Ines Ivan Jack Jana Jin Johan Jonas Julia Kai Karl
    Katya Kofi Lara Lena Leo Lina Lucas Maja Marco Maria Marta Max Mei Mila Mina Mona Nadia Nils
    Nina Noah Nora Olga Omar Oscar Otto Paul Pedro Petra Pia Quinn Rafael Rita Rosa Ruth Sami Sara
    Sofia Sven Tara Theo Tim Tina Uma Vera Victor Wanda Xenia Yara Yusuf Zoe
    """
)
CITIES = _words(
    """
    Accra Amman Athens Austin Berlin Bern Bogota Boston Bristol Cairo Cork Dakar Delhi Denver Dublin
    Geneva Ghent Hanoi Havana Helsinki Istanbul Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid
    Malmo Manila Milan Minsk Mumbai Munich Nairobi Naples Nice Oslo Paris Perth Porto Prague Quito
    Riga Rome Seoul Sofia Sydney Tallinn Tokyo Toronto Tunis Turin Utrecht Vienna Vilnius Warsaw
    Zagreb Zurich
    """
)
COLOURS = _words("red blue green black white brown orange purple pink silver gold grey yellow teal")
TABLES = _words(
    """
    users orders products customers books movies songs employees students teachers cars flights
    hotels rooms tickets invoices payments suppliers shops cities countries teams players games
    recipes patients doctors courses projects tasks
    """
)
COLUMNS = _words(
    """
    name email title city country phone address status category colour brand author owner director
    code date language currency region manager label summary
    """
)
AMOUNTS = _words(
    """
    age price total score rating salary weight height size quantity stock year pages length speed
    budget balance distance points level
    """
)
FILLER = _words(
    """
    a about after all also an and any are as ask at be below but by can case change check come
    could dear do down each easy enter every example fast few find first following for form found
    from get give go good great hand have hello help her here his how i if in into is it its
    just keep kind know last left let like line little long look made make many may me mean more
    most much must my need new next no not now of off old on once one only open or other our out
    over own part pick place please point put question read result right said same say see send
    set she show side simple since small so some start still such sure take tell text than thank
    thanks that the their them then there these they thing things think this those three time to
    today told too try turn two under up us use used using value values very want was way we well
    were what when where which while who why will with word words work would write yes yet you
    your
    """
)
